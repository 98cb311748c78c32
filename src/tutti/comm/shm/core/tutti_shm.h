/* Collectives and one-sided memory between processes of one host.
 *
 * Plain C11 with no Python and no torch in it, so that one build serves every version of both.
 * Every rank owns one segment per group and is its only writer; peers map it and read. A segment is
 * a memfd: it has no name in any directory, so nothing can be left behind, however a process dies.
 * Peers open it through /proc/PID/fd/FD, and whether that works is also the test of whether two
 * ranks share a host.
 *
 * Functions return 0 or a pointer on success, a negative TUTTI_* code or NULL on failure;
 * tutti_error() then has the text, for the calling thread. */
#ifndef TUTTI_SHM_H
#define TUTTI_SHM_H

#include <stddef.h>
#include <stdint.h>

#define TUTTI_ABI 2 /* raised whenever a struct or a signature here changes */
#define TUTTI_MAX_RANKS 256

enum {
    TUTTI_OK = 0,
    TUTTI_TIMEOUT = -1,      /* the text names the ranks that have not arrived and where they are */
    TUTTI_PEER_DIED = -2,    /* the text names the rank */
    TUTTI_PEER_LEFT = -3,    /* a peer closed the group while this rank waits for it */
    TUTTI_MISMATCH = -4,     /* ranks called different operations, sizes, dtypes or roots */
    TUTTI_NO_MEMORY = -5,    /* the text says how many bytes were needed */
    TUTTI_SYSTEM = -6,       /* a system call failed */
    TUTTI_BAD_ARGUMENT = -7,
    TUTTI_CLOSED = -8        /* this rank closed or aborted the group */
};

enum tutti_dtype {
    TUTTI_F64, TUTTI_F32, TUTTI_F16, TUTTI_BF16,
    TUTTI_I64, TUTTI_I32, TUTTI_I16, TUTTI_I8, TUTTI_U8, TUTTI_BOOL,
    TUTTI_BYTES /* moved, never reduced: every other dtype */
};

enum tutti_reduce {
    TUTTI_SUM, TUTTI_AVG, TUTTI_PRODUCT, TUTTI_MIN, TUTTI_MAX,
    TUTTI_BAND, TUTTI_BOR, TUTTI_BXOR
};

enum tutti_kind {
    TUTTI_BARRIER, TUTTI_ALL_REDUCE, TUTTI_REDUCE, TUTTI_BROADCAST, TUTTI_ALL_GATHER,
    TUTTI_REDUCE_SCATTER, TUTTI_GATHER, TUTTI_SCATTER, TUTTI_ALL_TO_ALL, TUTTI_SEND, TUTTI_RECV
};

/* One operation. Parts are per peer, so that lists of tensors, one flat tensor and uneven
 * splits are the same thing. The core copies this struct and its arrays; the memory that the parts
 * point to must live until the operation is done.
 *
 *   kind             in                          out
 *   all_reduce       1 part                      1 part (may be the same memory)
 *   reduce           1 part                      1 part at the root (may be the same), else none
 *   broadcast        1 part at the root          1 part elsewhere (none at the root)
 *   all_gather       1 part                      size parts
 *   reduce_scatter   size parts                  1 part
 *   gather           1 part                      size parts at the root, else none
 *   scatter          size parts at the root      1 part
 *   all_to_all       size parts                  size parts
 *   send             1 part, `peer`, `tag`       none
 *   recv             none                        1 part, `peer` (-1: any), `tag`
 *
 * all_gather, reduce_scatter, gather and scatter allow parts of different sizes per rank, as long
 * as every rank states the same sizes. */
typedef struct {
    uint32_t kind, dtype, reduce;
    int32_t root;                 /* rank in the group, or -1 */
    int32_t peer;                 /* for send and recv */
    uint32_t tag;
    uint32_t in_parts, out_parts; /* 0, 1 or size */
    const void *const *in;
    const uint64_t *in_bytes;
    void *const *out;
    const uint64_t *out_bytes;
    const char *where;            /* "file.py:12 in step" of the caller, or NULL */
    int32_t *source;              /* recv by tutti_run: gets the sender's rank, unless NULL */
} tutti_operation;

const char *tutti_error(void);
int tutti_error_code(void); /* the code of the calling thread's last failure */
int tutti_abi(void);
const char *tutti_vector_code(void); /* "avx512", "avx2", "sse2", "neon", "plain" */

/* ---- Segments: memory of one process that others map. ---- */
typedef struct tutti_segment tutti_segment;
tutti_segment *tutti_segment_create(const char *label, uint64_t bytes); /* memory is reserved now */
tutti_segment *tutti_segment_open(int64_t pid, int fd, uint64_t bytes); /* 0: of any size */
void *tutti_segment_base(const tutti_segment *);
uint64_t tutti_segment_bytes(const tutti_segment *);
int tutti_segment_fd(const tutti_segment *);
int tutti_segment_owner_lives(const tutti_segment *); /* 1 yes, 0 the creating process has died */
void tutti_segment_close(tutti_segment *);

/* ---- Groups. Every rank creates its own, tells peers (pid, fd, bytes, token) by a store, opens
 * each peer's. `token`: any number that all ranks of the group know and no other group has. ---- */
typedef struct tutti_group tutti_group;
tutti_group *tutti_group_create(const char *name, int rank, int size, uint64_t staging_bytes,
                                uint64_t token);
int tutti_group_fd(const tutti_group *);
uint64_t tutti_group_bytes(const tutti_group *);
int tutti_group_connect(tutti_group *, int peer, int64_t pid, int fd, uint64_t bytes);
void tutti_group_abort(tutti_group *); /* fails what runs and what is queued with TUTTI_CLOSED */
void tutti_group_close(tutti_group *); /* aborts, joins the worker threads, frees */

/* Tensors at the same place of a symmetric block on every rank are reduced and gathered without
 * staging. `id` is the same on all ranks; bases[rank] is where this process sees a rank's block. */
int tutti_group_add_block(tutti_group *, uint64_t id, void *const *bases, uint64_t bytes);
int tutti_group_remove_block(tutti_group *, uint64_t id);

/* Memory of this process alone, for tensors that are to be reduced and gathered without staging by
 * every group of this host: peers map it when they first need it. Nothing is agreed on before, and
 * a rank whose tensor lies elsewhere makes the others stage, too. NULL when there is not enough.
 * Taken back when no operation uses it; before or after its groups are closed. */
void *tutti_lend(uint64_t bytes);
void tutti_take_back(void *memory);

/* ---- Operations. ---- */
/* Runs now in the calling thread when nothing is queued, else in turn. Blocks. A timeout that is
 * not positive means none. After a timeout, a mismatch or a death the group is broken: every later
 * operation fails at once, with the first reason. */
int tutti_run(tutti_group *, const tutti_operation *, double timeout_s);

/* Queues for a worker thread of the group. `done`, if not NULL, is called once when the operation
 * is over, by whichever thread ran it (a worker, or one that waits) and with no lock held; a wait
 * for the operation may end earlier than the call, closing the group does not. It may call back
 * into this library and wait for any operation; it must not close the group, nor wait for what
 * another thread does only after a wait, since that may be the thread that it is called by. */
typedef struct tutti_work tutti_work;
typedef void (*tutti_done)(void *argument, int code, const char *text);
tutti_work *tutti_submit(tutti_group *, const tutti_operation *, double timeout_s, tutti_done done,
                         void *argument);
int tutti_work_is_done(const tutti_work *);
int32_t tutti_work_source(const tutti_work *); /* of a recv that is done: the sender's rank */
int tutti_work_wait(tutti_work *, double timeout_s); /* < 0: the operation's own timeout */
void tutti_work_free(tutti_work *);                  /* the operation itself goes on */

/* ---- The ledger: the last operations of every rank lie in its segment (layout in ledger.h), so
 * that a person can read them from outside a stuck process. ---- */
/* Where this process's main thread is now, sampled about once a second by its host language. */
void tutti_note_place(const char *text);

/* ---- One-sided memory: any address inside a mapped segment. ---- */
void tutti_put(void *to, const void *from, uint64_t bytes);
void tutti_put_signal(void *to, const void *from, uint64_t bytes, uint64_t *signal, uint64_t value,
                      int add); /* the value is visible only after the bytes are */
/* Waits until *signal >= value. `watched`: the segment whose owner must live meanwhile, or NULL. */
int tutti_wait_signal(const uint64_t *signal, uint64_t value, double timeout_s,
                      const tutti_segment *watched);
uint64_t tutti_load(const uint64_t *);
void tutti_store(uint64_t *, uint64_t);
uint64_t tutti_fetch_add(uint64_t *, uint64_t);
uint64_t tutti_compare_swap(uint64_t *, uint64_t expected, uint64_t desired); /* what was there */
void tutti_fence(void);
/* Two ranks hand a line, which is 0, to each other so many times: nanoseconds for there and back,
 * or -1 if the other did not come in time. Neither ever sleeps: give each a core. */
double tutti_round_trip_ns(uint64_t *line, int first, uint32_t turns, double timeout_s);
/* Reduces `parts` arrays of `count` elements in the order given. Used by symmetric collectives. */
int tutti_reduce_into(void *out, const void *const *parts, uint32_t n_parts, uint64_t count,
                      uint32_t dtype, uint32_t reduce);

#endif
