/* Private declarations shared by the files of the core. Nothing here is exported. */
#ifndef TUTTI_INTERNAL_H
#define TUTTI_INTERNAL_H

#include "ledger.h"
#include "tutti_shm.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>

#define TUTTI_API __attribute__((visibility("default")))
#define LINE 64 /* bytes of a cache line */
/* Staging slots per rank. No rank is more than SLOTS rounds ahead of another rank (rounds.h). */
#define SLOTS 4

static inline uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* ---- errors.c: the calling thread's last error, and broken groups ---- */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int fail_errno(const char *what);
/* Returns 0, or the error with which every operation of this group fails from now on. */
int group_usable(tutti_group *);
/* Marks the group as permanently broken, for this rank and its peers, and wakes every thread that
 * waits in the group. Returns the code of the group's first failure, which may differ from
 * `code`. */
int break_group(tutti_group *, int code, const char *text);
/* Returns an error if a wait for `peer` can no longer succeed, because this rank has aborted or the
 * peer's state is LEFT or BROKEN. Otherwise returns 0. With `check_alive` (a system call) also
 * checks whether the peer's process has died. */
int peer_error(tutti_group *, int peer, bool check_alive);

/* ---- segment.c ---- */
/* Initializes the lock in a forked child, because the thread that held it does not exist there. */
void reset_segment_lock(void);
/* Closes the descriptor but keeps the mapping. After this call, tutti_segment_owner_lives cannot be
 * used. */
void segment_close_descriptor(tutti_segment *);

/* ---- futex.c: time and waiting ---- */
#define FOREVER UINT64_MAX
uint64_t now_ns(void);                   /* CLOCK_MONOTONIC */
uint64_t deadline_after(double seconds); /* FOREVER if `seconds` is not positive or above 1e9 */

/* A waiter spins `spins` times, then calls sched_yield `yields` times, then sleeps. */
typedef struct {
    uint32_t spins, yields;
} spin_limits;
typedef struct {
    spin_limits limit;
    uint32_t turns;
    uint64_t sleep_ns, alive_checked_ns;
} pause_state;
spin_limits spin_limits_for(int ranks); /* uses the number of CPUs counted so far */
spin_limits worker_spin_limits(void);   /* worker threads share a CPU with the computation */
/* Counts the CPUs on which these processes may run: the union of their affinity masks, limited by
 * the cgroup CPU quota. Later calls of spin_limits_for use the result. */
void count_cpus_of(const int64_t *pids, int n);
/* Spins, yields or sleeps once. Returns true if the slow checks (deadline, liveness, abort) are
 * due. */
bool pause_once(pause_state *);
/* Like pause_once, but never sleeps. Returns false once all spins and yields are used up. */
bool pause_awake(pause_state *, bool *should_check);
bool alive_check_due(pause_state *, uint64_t now);
/* If *word is equal to `seen`, sleeps until futex_wake_all is called, but for at most 20 ms,
 * because a process that is killed cannot wake its waiters. */
void futex_wait(_Atomic uint32_t *word, uint32_t seen);
void futex_wake_all(_Atomic uint32_t *word);

/* ---- memory.c ---- */
uint64_t available_memory(const char **where); /* in bytes; *where names the limit, for messages */
/* Maps a file of shared memory and fills all page table entries. On failure returns MAP_FAILED and
 * sets errno. The creator spends more time than its peers to get huge pages, because all
 * mappings share these pages. */
void *map_pages(int fd, uint64_t bytes, bool creator);
double cgroup_cpu_quota(void); /* CPUs that the cgroup allows; HUGE_VAL if there is no limit */

/* ---- copy.c ---- */
void copy_bytes(void *to, const void *from, uint64_t bytes);
/* Copies with non-temporal stores. A later release store orders these stores only after
 * stream_fence(). */
void stream_bytes(void *to, const void *from, uint64_t bytes);
void stream_fence(void);
/* Records which kind of store is faster for bytes that another CPU reads next. */
typedef struct {
    uint32_t count;
    bool streaming; /* non-temporal stores are faster */
} store_sampler;
/* Copies bytes that another CPU reads next, with the kind of store that is faster. */
void copy_to_peer(store_sampler *, void *to, const void *from, uint64_t bytes);

/* ---- reduce_kernels.c ---- */
size_t dtype_bytes(uint32_t dtype);
const char *dtype_name(uint32_t dtype);
const char *reduce_name(uint32_t reduce);
bool can_reduce(uint32_t dtype, uint32_t reduce);
void reduce_parts(void *out, const void *const *parts, uint32_t n, uint64_t count, uint32_t dtype,
                  uint32_t reduce); /* out may be one of the parts */
/* Like reduce_parts, but also writes the result to `copies`, block by block, while a block is in
 * the L1 cache. */
void reduce_and_copy(void *out, void *const *copies, uint32_t n_copies, bool streaming,
                     const void *const *parts, uint32_t n, uint64_t count, uint32_t dtype,
                     uint32_t reduce);

/* ---- The control block: the part of a rank's segment through which ranks synchronize ----
 *
 * Writers of each word: `posted`, `fingerprint`, `offer`, `consumed`, `state`, `code` and `reason`
 * are written by the owner only. `waiters` and `p2p_waiters` are counters that every rank changes
 * by atomic read-modify-write. The owner increments `futex` and `p2p_futex`. Any other rank of the
 * group increments both words when it aborts, and `p2p_futex` when it has moved bytes of a
 * message. */
enum { RUNNING = 0, LEFT = 1, BROKEN = 2 };

typedef struct {
    _Alignas(2 * LINE) _Atomic uint64_t posted; /* the last round whose bytes are staged */
    _Atomic uint64_t fingerprint[SLOTS];        /* hash of all operations so far, by round */
    /* Memory id and offset for direct access (direct.c), by round. */
    _Alignas(LINE) _Atomic uint64_t offer[SLOTS][2];
    _Alignas(2 * LINE) _Atomic uint64_t consumed; /* the last round that this rank has read */
    _Alignas(2 * LINE) _Atomic uint32_t waiters;  /* threads of peers that sleep on `futex` */
    _Atomic uint32_t futex;                       /* changes when this rank posts or consumes */
    _Alignas(2 * LINE) _Atomic uint32_t p2p_waiters; /* own threads that sleep on p2p_futex */
    _Atomic uint32_t p2p_futex;                /* changes when bytes of a message have moved */
    _Alignas(2 * LINE) _Atomic uint32_t state; /* RUNNING, LEFT, BROKEN */
    _Atomic int32_t code;                      /* the failure, when BROKEN */
    _Atomic uint64_t reason[TUTTI_REASON_WORDS];
} control;

typedef struct {
    _Alignas(2 * LINE) _Atomic uint64_t at; /* bytes ever written to, or read from, a ring */
} ring_mark;

typedef struct {
    tutti_segment *segment;
    tutti_header *header;
    control *control;
    tutti_entry *ledger;
    tutti_location *location;
    ring_mark *sent;     /* sent[p]: how far this rank has written its ring to p */
    ring_mark *received; /* received[p]: how far this rank has read the ring from p */
    unsigned char *rings;
    unsigned char *slots;
    uint64_t consumed; /* lower bound of control->consumed, to avoid reading the peer's cache line */
} peer;

typedef struct block { /* symmetric memory that all ranks of the group have mapped */
    uint64_t id, bytes;
    struct block *next;
    unsigned char *bases[];
} block;

struct tutti_work {
    tutti_operation operation; /* with copies of its arrays */
    double timeout;
    uint64_t deadline;
    tutti_done done;
    void *argument;
    tutti_group *group;
    uint64_t entry; /* id in the ledger */
    uint64_t sequence;
    atomic_int references;
    atomic_int is_done;
    int code;
    int32_t source;
    char *text; /* error message; NULL on success, or if there was no memory for a copy */
    struct tutti_work *next;
    uint64_t moved; /* send and recv: bytes already in or out of the ring */
    bool started;
    void *parts[]; /* in, out, in_bytes, out_bytes */
};

typedef struct p2p_state p2p_state; /* p2p.c */
typedef struct mapping mapping;     /* exported.c */

struct tutti_group {
    char name[TUTTI_NAME_BYTES];
    int rank, size;
    uint64_t token, slot_bytes, slot_stride, ring_bytes;
    unsigned fork_generation;
    spin_limits limits, limits_now; /* for calling threads; for the thread that runs a collective */
    peer *peers;                    /* `size` entries, this rank's own included */
    int connected;
    pthread_mutex_t blocks_lock;
    _Atomic(block *) blocks;
    tutti_group *next; /* list of the groups of this process */

    atomic_int broken; /* code of the first failure, with which every later operation fails */
    pthread_mutex_t broken_lock;
    char *broken_text;

    _Atomic uint64_t ledger_next;
    uint64_t realtime_offset; /* CLOCK_REALTIME minus CLOCK_MONOTONIC */

    /* One collective runs at a time, in the caller, in a waiting thread or in a worker thread. */
    pthread_mutex_t lock;
    pthread_cond_t work_queued, collective_over;
    bool collective_runs, closing;
    int inside; /* number of threads inside a call; closing waits until it is 0 */
    pthread_t *workers;
    int started, ready; /* number of worker threads; number of them not inside a callback */
    tutti_work *queue_head, *queue_tail;
    uint64_t collectives; /* number of calls so far; the sequence number of the last one */

    /* State of the running collective. Only the thread that set `collective_runs` uses it. */
    uint64_t round, fingerprint, consumed_by_all;
    const tutti_operation *running;
    uint64_t running_sequence, running_deadline;
    double running_timeout;
    uint64_t table_bytes; /* bytes of the table of sizes at the start of each slot */
    store_sampler sampler;
    bool stream_results;  /* results are written with non-temporal stores */
    const void **sources; /* `size` entries, scratch for reductions */
    void **copies;        /* `size` entries, scratch for direct reductions */
    mapping *mappings;    /* peers' exported memory that this rank has mapped */

    p2p_state *p2p;
};

/* ---- group.c ---- */
/* Fails in a forked child, because the child does not have the group's threads and must not write
 * to the group's rings. */
int refuse_forked_child(const tutti_group *);
static inline unsigned char *slot_of(const tutti_group *g, int rank, uint64_t round)
{
    return g->peers[rank].slots + (round % SLOTS) * g->slot_stride;
}

/* Index of `reader` among the size - 1 peers of `owner`. It selects the reader's ring, or the
 * reader's share of a slot. */
static inline uint64_t lane(int owner, int reader)
{
    return (uint64_t)(reader < owner ? reader : reader - 1);
}

/* ---- exported.c ---- */
/* A block is removed only while no operation uses it. Therefore the returned block stays valid
 * during an operation. */
const block *block_of(tutti_group *, const void *address, uint64_t bytes);
const block *block_by_id(tutti_group *, uint64_t id);
void free_blocks(tutti_group *);
#define EXPORTED ((uint64_t)1 << 63) /* set in ids of exported memory, clear in ids of blocks */
bool find_exported(const void *address, uint64_t bytes, uint64_t *id, uint64_t *offset);
/* Finds the address at which this process has mapped a rank's exported memory. Maps the memory at
 * first use. Called by the thread that runs the collective. */
int map_exported(tutti_group *, int rank, uint64_t id, unsigned char **memory);
void free_mappings(tutti_group *);
void reset_export_lock(void);

/* ---- ledger.c ---- */
const char *kind_name(uint32_t kind);
uint64_t operation_bytes(const tutti_operation *);
uint64_t ledger_open(tutti_group *, const tutti_operation *, uint64_t sequence, int state);
void ledger_mark(tutti_group *, uint64_t id, int state);
void describe_peer(const tutti_group *, int rank, char *text, size_t room);
/* Describes the first collective in which this rank and a peer differ. Returns false if none is
 * found. */
bool describe_difference(const tutti_group *, int rank, char *text, size_t room);
void text_to_words(_Atomic uint64_t *words, int n, const char *text);
void words_to_text(const _Atomic uint64_t *words, int n, char *text);
void write_location(tutti_location *, const char *text);

/* ---- operations.c ---- */
int check_operation(const tutti_group *, const tutti_operation *);
/* Returns a hash of the arguments that must be equal on all ranks. The hash is never 0. */
uint64_t operation_fingerprint(const tutti_operation *);
uint64_t hash_combine(uint64_t, uint64_t);
tutti_work *work_create(tutti_group *, const tutti_operation *, double timeout, tutti_done,
                        void *argument);
/* work_end marks the operation as done. work_call_back runs its callback, with no lock held. These
 * are two functions, because a callback may wait for another operation. */
void work_end(tutti_work *, int code, const char *text);
void work_call_back(tutti_work *);
void work_release(tutti_work *);
bool inside_callback(void); /* returns whether the calling thread is running a callback */
void wake_queue(tutti_group *);
void stop_workers(tutti_group *);

/* ---- collectives.c ---- */
int run_collective(tutti_group *, const tutti_operation *, uint64_t sequence, uint64_t entry,
                   double timeout, uint64_t deadline);

/* ---- p2p.c ---- */
int p2p_create(tutti_group *);
int p2p_run(tutti_group *, const tutti_operation *, double timeout);
void p2p_submit(tutti_group *, tutti_work *, const char *where);
int p2p_wait(tutti_work *, uint64_t deadline);
void p2p_abort(tutti_group *); /* fails all messages with the group's error */
void p2p_close(tutti_group *);

#endif
