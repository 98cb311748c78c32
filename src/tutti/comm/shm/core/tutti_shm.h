/* Collectives and one-sided memory between processes of one host.
 *
 * The core is plain C11 and uses neither Python nor torch, so that one build works with every
 * version of Python and torch. Every rank creates one segment per group, and its peers map this
 * segment for reading and writing. Most data in a segment is written only by the rank that owns the
 * segment: the bytes of collectives (staging slots, rounds.h), the bytes of messages (rings, p2p.c)
 * and the rank's progress. Futex words and waiter counters are atomics that several ranks write
 * (internal.h lists their writers). A segment is a memfd. It has no name in any file system, so the
 * kernel frees it even if its processes are killed. Peers open a segment through /proc/PID/fd/FD.
 * Two ranks are on the same host if each rank can open the other rank's segment in this way.
 *
 * tutti/comm/shm/native.py parses the enums of this file, ledger.h and structures.h. Therefore
 * every enumerator must have the simple form "NAME = value" or "NAME".
 *
 * Functions return 0 or a pointer on success, and a negative TUTTI_* code or NULL on failure. After
 * a failure, tutti_error() returns the message of the calling thread's last error. */
#ifndef TUTTI_SHM_H
#define TUTTI_SHM_H

#include <stddef.h>
#include <stdint.h>

#define TUTTI_ABI 3 /* increment when a struct or a signature in this file changes */
#define TUTTI_MAX_RANKS 256

enum {
    TUTTI_OK = 0,
    TUTTI_TIMEOUT = -1,      /* the message names the late ranks and their locations */
    TUTTI_PEER_DIED = -2,    /* the message names the rank */
    TUTTI_PEER_LEFT = -3,    /* a peer closed the group while this rank waited for it */
    TUTTI_MISMATCH = -4,     /* ranks called different operations, sizes, dtypes or roots */
    TUTTI_NO_MEMORY = -5,    /* the message contains the number of bytes needed */
    TUTTI_SYSTEM = -6,       /* a system call failed */
    TUTTI_BAD_ARGUMENT = -7,
    TUTTI_CLOSED = -8        /* this rank closed or aborted the group */
};

enum tutti_dtype {
    TUTTI_F64, TUTTI_F32, TUTTI_F16, TUTTI_BF16,
    TUTTI_I64, TUTTI_I32, TUTTI_I16, TUTTI_I8, TUTTI_U8, TUTTI_BOOL,
    TUTTI_BYTES /* any other dtype; can be copied, but not reduced */
};

enum tutti_reduce {
    TUTTI_SUM, TUTTI_AVG, TUTTI_PRODUCT, TUTTI_MIN, TUTTI_MAX,
    TUTTI_BAND, TUTTI_BOR, TUTTI_BXOR
};

enum tutti_kind {
    TUTTI_BARRIER, TUTTI_ALL_REDUCE, TUTTI_REDUCE, TUTTI_BROADCAST, TUTTI_ALL_GATHER,
    TUTTI_REDUCE_SCATTER, TUTTI_GATHER, TUTTI_SCATTER, TUTTI_ALL_TO_ALL, TUTTI_SEND, TUTTI_RECV
};

/* One operation. Its memory is described as parts, one per peer, so that lists of tensors, one flat
 * tensor and uneven splits need no separate code. The core copies this struct and its arrays. The
 * memory that the parts point to must stay valid until the operation is done.
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
 * all_gather, reduce_scatter, gather and scatter accept parts of different sizes per rank, as long
 * as all ranks pass the same sizes. */
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
    const char *where;            /* the caller's "file.py:12 in step", or NULL */
    int32_t *source;              /* NULL, or where tutti_run stores the sender of a recv */
} tutti_operation;

const char *tutti_error(void);
int tutti_error_code(void); /* the code of the calling thread's last failure */
int tutti_abi(void);
const char *tutti_vector_code(void); /* "avx512", "avx2", "sse2", "neon", "plain" */

/* ---- Segments: memory that one process creates and others map. ---- */
typedef struct tutti_segment tutti_segment;
tutti_segment *tutti_segment_create(const char *label, uint64_t bytes); /* reserves the memory */
tutti_segment *tutti_segment_open(int64_t pid, int fd, uint64_t bytes); /* bytes = 0: any size */
void *tutti_segment_base(const tutti_segment *);
uint64_t tutti_segment_bytes(const tutti_segment *);
int tutti_segment_fd(const tutti_segment *);
int tutti_segment_owner_lives(const tutti_segment *); /* returns 0 if the creator has died */
void tutti_segment_close(tutti_segment *);

/* ---- Groups. Every rank creates its segment, publishes (pid, fd, bytes) through a store and
 * connects to each peer. `token` is a number that is the same on all ranks of a group and different
 * in every other group. ---- */
typedef struct tutti_group tutti_group;
tutti_group *tutti_group_create(const char *name, int rank, int size, uint64_t staging_bytes,
                                uint64_t token);
int tutti_group_fd(const tutti_group *);
uint64_t tutti_group_bytes(const tutti_group *);
int tutti_group_connect(tutti_group *, int peer, int64_t pid, int fd, uint64_t bytes);
void tutti_group_abort(tutti_group *); /* running and queued operations fail with TUTTI_CLOSED */
void tutti_group_close(tutti_group *); /* aborts, joins the worker threads, frees */

/* Registers symmetric memory: tensors inside the block are reduced and gathered without staging
 * copies. `id` must be the same on all ranks. bases[rank] is the address at which this process has
 * mapped a rank's block. Remove a block only while no operation uses it. */
int tutti_group_add_block(tutti_group *, uint64_t id, void *const *bases, uint64_t bytes);
int tutti_group_remove_block(tutti_group *, uint64_t id);

/* Exported memory is allocated by one process without any call on its peers. The peers map the
 * memory when an operation first uses it. Tensors inside exported memory are reduced and gathered
 * without staging copies by every group of this host, provided that every rank's tensor lies in
 * exported memory or in a block. tutti_export_alloc returns NULL if there is not enough memory.
 * Free exported memory only while no operation uses it. The groups may be open or closed. */
void *tutti_export_alloc(uint64_t bytes);
void tutti_export_free(void *memory);

/* ---- Operations. ---- */
/* Runs an operation and returns when it has ended. The operation runs in the calling thread if the
 * queue is empty, otherwise after the queued operations. If `timeout_s` is not positive, there is
 * no timeout. After a timeout, a mismatch or the death of a peer, the group is broken: every later
 * operation fails immediately with the first error. */
int tutti_run(tutti_group *, const tutti_operation *, double timeout_s);

/* Queues the operation for a worker thread. `done`, if not NULL, is called once when the operation
 * has ended, by the thread that ran the operation (a worker, or a thread that waits), with no lock
 * held. A wait for the operation may return before `done` has returned. tutti_group_close returns
 * only after `done` has returned. `done` may call this library and wait for any operation. `done`
 * must not close the group. `done` may run in a thread that is inside tutti_work_wait. To avoid a
 * deadlock, `done` must not wait for anything that this thread does after tutti_work_wait has
 * returned. */
typedef struct tutti_work tutti_work;
typedef void (*tutti_done)(void *argument, int code, const char *text);
tutti_work *tutti_submit(tutti_group *, const tutti_operation *, double timeout_s, tutti_done done,
                         void *argument);
int tutti_work_is_done(const tutti_work *);
int32_t tutti_work_source(const tutti_work *); /* the sender's rank, after a recv is done */
int tutti_work_wait(tutti_work *, double timeout_s); /* < 0: until the operation's timeout */
void tutti_work_free(tutti_work *);                  /* does not cancel the operation */

/* ---- The ledger: the last operations of every rank are recorded in its segment (layout:
 * ledger.h), so that they can be read from outside a stuck process. ---- */
/* Records the source location of the process's main thread, sampled about once a second. */
void tutti_note_location(const char *text);

/* ---- One-sided memory: any address inside a mapped segment. ---- */
void tutti_put(void *to, const void *from, uint64_t bytes);
void tutti_put_signal(void *to, const void *from, uint64_t bytes, uint64_t *signal, uint64_t value,
                      int add); /* the bytes become visible before the value */
/* Waits until *signal >= value. Fails if `watched` is not NULL and its owner dies during the
 * wait. */
int tutti_wait_signal(const uint64_t *signal, uint64_t value, double timeout_s,
                      const tutti_segment *watched);
uint64_t tutti_load(const uint64_t *);
void tutti_store(uint64_t *, uint64_t);
uint64_t tutti_fetch_add(uint64_t *, uint64_t);
uint64_t tutti_compare_swap(uint64_t *, uint64_t expected, uint64_t desired); /* returns the old value */
void tutti_fence(void);
/* Two ranks pass a cache line, initially 0, back and forth `turns` times. `first` is 1 on the rank
 * that begins and 0 on the other rank. Returns the nanoseconds per round trip, or -1 on a timeout.
 * Neither rank sleeps, so each rank needs its own CPU. */
double tutti_round_trip_ns(uint64_t *line, int first, uint32_t turns, double timeout_s);
/* Reduces `n_parts` arrays of `count` elements. The arrays are combined in the given order. */
int tutti_reduce_into(void *out, const void *const *parts, uint32_t n_parts, uint64_t count,
                      uint32_t dtype, uint32_t reduce);

#endif
