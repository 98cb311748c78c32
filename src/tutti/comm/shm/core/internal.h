/* What the files of the core share. Nothing here is visible outside of it. */
#ifndef TUTTI_INTERNAL_H
#define TUTTI_INTERNAL_H

#include "ledger.h"
#include "tutti_shm.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>

#define TUTTI_API __attribute__((visibility("default")))
#define LINE 64
#define SLOTS 4 /* staging slots; no rank is ever more than this many rounds ahead of another */

/* ---- errors (segment.c): the text of the calling thread's last failure ---- */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int fail_errno(const char *what);
void forget_segment_lock(void); /* in a forked child: who held it is not there */
void segment_is_mapped(tutti_segment *); /* nobody will ask for its descriptor or its owner */

/* ---- time and waiting (wait.c) ---- */
#define FOREVER UINT64_MAX
uint64_t now_ns(void);
uint64_t deadline_after(double seconds); /* not positive or not finite: never */

/* How long a waiter burns its core, then offers it to others, before it sleeps. */
typedef struct {
    uint32_t spins, yields;
} patience;
typedef struct {
    patience limit;
    uint32_t turns;
    uint64_t sleep_ns, life_checked_ns;
} pause_state;
patience patience_for(int ranks);
/* Workers share their core with those who compute: they hand it over almost at once. */
patience patience_of_worker(void);
/* Passes some time; true when the dearer conditions (deadline, death, abort) need a look. */
bool pause_once(pause_state *);
/* The same without ever sleeping: false when patience is at its end. */
bool pause_awake(pause_state *, bool *should_look);
bool life_check_is_due(pause_state *, uint64_t now);
/* Sleeps until *bell is no longer `heard`, or for a while; ring_bell wakes all who sleep. */
void sleep_on_bell(_Atomic uint32_t *bell, uint32_t heard);
void ring_bell(_Atomic uint32_t *bell);

/* ---- pages.c ---- */
/* Bytes that a process may still take, and who has them, for a sentence. */
uint64_t available_memory(const char **where);
/* A file of shared memory, mapped with all its pages entered; MAP_FAILED and errno if not. The
 * first who maps it takes longer to get large pages, which the others then find. */
void *map_pages(int fd, uint64_t bytes, bool first);

/* ---- copies (copy.c) ---- */
void copy_bytes(void *to, const void *from, uint64_t bytes);
/* Past the caches: a release store orders such bytes only after streams_end(). */
void stream_bytes(void *to, const void *from, uint64_t bytes);
void streams_end(void);
typedef struct {
    uint32_t count;
    bool dear; /* taking lines back from another core */
} crossing;
/* Copies bytes that another core will read next, in whichever way is cheaper here. */
void hand_over(crossing *, void *to, const void *from, uint64_t bytes);

/* ---- reductions (reduce.c) ---- */
size_t dtype_bytes(uint32_t dtype);
const char *dtype_name(uint32_t dtype);
const char *reduce_name(uint32_t reduce);
bool can_reduce(uint32_t dtype, uint32_t reduce);
void reduce_parts(void *out, const void *const *parts, uint32_t n, uint64_t count, uint32_t dtype,
                  uint32_t reduce); /* out may be one of the parts */
/* The same, and the result handed over to all places as it is made, in one pass over memory. */
void reduce_to_all(void *out, void *const *places, uint32_t n_places, bool past_caches,
                   const void *const *parts, uint32_t n, uint64_t count, uint32_t dtype,
                   uint32_t reduce);

/* ---- what a rank publishes; each line has one writer, its owner ---- */
enum { RUNNING = 0, LEFT = 1, BROKEN = 2 };

typedef struct {
    _Alignas(2 * LINE) _Atomic uint64_t posted; /* the last round whose bytes are staged */
    _Atomic uint64_t print[SLOTS];              /* all operations so far, as one number, by round */
    _Alignas(LINE) _Atomic uint64_t place[SLOTS][2]; /* block id and offset of symmetric memory */
    _Alignas(2 * LINE) _Atomic uint64_t consumed; /* the last round whose peers' bytes were read */
    _Alignas(2 * LINE) _Atomic uint32_t sleepers; /* peers that sleep until this rank rings */
    _Atomic uint32_t bell;
    _Alignas(2 * LINE) _Atomic uint32_t mail_sleepers; /* threads of this rank; others ring */
    _Atomic uint32_t mail_bell;
    _Alignas(2 * LINE) _Atomic uint32_t state; /* RUNNING, LEFT, BROKEN */
    _Atomic int32_t code;                      /* why, when BROKEN */
    _Atomic uint64_t reason[TUTTI_REASON_WORDS];
} control;

typedef struct {
    _Alignas(2 * LINE) _Atomic uint64_t at; /* bytes ever written to or read from a ring */
} ring_mark;

typedef struct {
    tutti_segment *segment;
    tutti_header *header;
    control *control;
    tutti_entry *ledger;
    tutti_place *place;
    ring_mark *sent;     /* sent[p]: how far this rank has written its ring to p */
    ring_mark *received; /* received[p]: how far it has read the ring from p */
    unsigned char *rings;
    unsigned char *slots;
    uint64_t consumed; /* a lower bound, so that the peer's line is seldom read */
} peer;

typedef struct block {
    uint64_t id, bytes;
    struct block *next;
    unsigned char *bases[];
} block;

struct tutti_work {
    tutti_operation operation; /* with its own arrays */
    double timeout;
    uint64_t deadline;
    tutti_done done;
    void *argument;
    tutti_group *group;
    uint64_t entry; /* its id in the ledger */
    uint64_t sequence;
    atomic_int references;
    atomic_int is_done;
    int code;
    int32_t source;
    char *text;
    struct tutti_work *next;
    uint64_t moved; /* messages: bytes already in or out of the ring */
    bool started;
    void *parts[]; /* in, out, in_bytes, out_bytes */
};

typedef struct mail mail; /* mail.h */
typedef struct borrowed borrowed; /* lent.c */

struct tutti_group {
    char name[TUTTI_NAME_BYTES];
    int rank, size;
    uint64_t token, slot_bytes, slot_stride, ring_bytes;
    unsigned fork_generation;
    patience patience, patience_now; /* of callers; of whoever runs the collective */
    peer *peers; /* of size, this rank's own included */
    int connected;
    pthread_mutex_t blocks_lock;
    _Atomic(block *) blocks;
    tutti_group *next; /* of this process */

    atomic_int broken; /* the first failure's code; every later operation fails with it */
    pthread_mutex_t broken_lock;
    char *broken_text;

    _Atomic uint64_t ledger_next;
    uint64_t realtime_offset; /* CLOCK_REALTIME minus CLOCK_MONOTONIC */

    /* Whoever runs a collective (the caller, a waiter, the worker) holds the turn. */
    pthread_mutex_t lock;
    pthread_cond_t work_queued, turn_over;
    bool turn_taken, closing;
    int inside; /* threads that a close must wait for */
    pthread_t *workers;
    int started, ready; /* workers; those of them that are not inside a callback */
    tutti_work *queue_head, *queue_tail;
    uint64_t collectives; /* numbered as called */

    /* Of the collective that runs now. */
    uint64_t round, print, consumed_by_all;
    const tutti_operation *running;
    uint64_t running_sequence, running_deadline, running_begun;
    double running_timeout;
    uint64_t table_bytes; /* at the start of each slot */
    crossing crossing;
    bool past_caches; /* whether results go straight to memory */
    const void **sources; /* of size, scratch for reductions */
    void **places;        /* as many */
    borrowed *borrowed;   /* peers' lent memory that this rank has mapped */

    mail *mail;
};

/* ---- group.c ---- */
/* A child has neither the threads that end operations nor a right to the rings. */
int refuse_forked_child(const tutti_group *);
static inline unsigned char *slot_of(const tutti_group *g, int rank, uint64_t round)
{
    return g->peers[rank].slots + (round % SLOTS) * g->slot_stride;
}

/* Of the n - 1 shares that `owner` keeps for the others, the one for `reader`. */
static inline uint64_t lane(int owner, int reader)
{
    return (uint64_t)(reader < owner ? reader : reader - 1);
}

/* ---- trouble.c ---- */
int group_usable(tutti_group *);
/* Marks the group as broken for good, here and for peers; returns the first failure's code. */
int break_group(tutti_group *, int code, const char *text);
/* Looks at what makes a wait for `peer` hopeless: own abort, its state, its death. */
int peer_trouble(tutti_group *, int peer, bool look_for_death);

/* ---- blocks.c ---- */
/* Blocks are removed only when no operation uses them, so what is found may be kept for one. */
const block *block_of(tutti_group *, const void *address, uint64_t bytes);
const block *block_by_id(tutti_group *, uint64_t id);
void free_blocks(tutti_group *);

/* ---- lent.c ---- */
#define LENT ((uint64_t)1 << 63) /* in a block's id: memory that a rank lends, not a block of all */
bool lent_place(const void *address, uint64_t bytes, uint64_t *id, uint64_t *offset);
/* Where this process sees what a rank lends; mapped at the first use. Needs the turn. */
int borrow(tutti_group *, int rank, uint64_t id, unsigned char **memory);
void free_borrowed(tutti_group *);
void forget_lent_lock(void);

/* ---- ledger.c ---- */
const char *kind_name(uint32_t kind);
uint64_t operation_bytes(const tutti_operation *);
uint64_t ledger_open(tutti_group *, const tutti_operation *, uint64_t sequence, int state);
void ledger_mark(tutti_group *, uint64_t id, int state);
void describe_peer(const tutti_group *, int rank, char *text, size_t room);
/* The first collective in which this rank and a peer differ, as text; false when not found. */
bool describe_difference(const tutti_group *, int rank, char *text, size_t room);
void text_to_words(_Atomic uint64_t *words, int n, const char *text);
void words_to_text(const _Atomic uint64_t *words, int n, char *text);
void write_place(tutti_place *, const char *text);

/* ---- operation.c ---- */
int check_operation(const tutti_group *, const tutti_operation *);
/* What must be alike on all ranks, as one number that is never 0. */
uint64_t operation_print(const tutti_operation *);
uint64_t mix(uint64_t, uint64_t);

/* ---- collectives.c ---- */
int run_collective(tutti_group *, const tutti_operation *, uint64_t sequence, uint64_t entry,
                   double timeout, uint64_t deadline);

/* ---- work.c ---- */
tutti_work *work_create(tutti_group *, const tutti_operation *, double timeout, tutti_done,
                        void *argument);
/* Marks as done and calls back: apart, since the callback may wait for whom this lets go on. */
void work_end(tutti_work *, int code, const char *text);
void work_call_back(tutti_work *); /* with no lock held */
void work_release(tutti_work *);
bool inside_callback(void); /* whether this thread is */

/* ---- worker.c ---- */
void wake_queue(tutti_group *); /* after an abort */
void stop_worker(tutti_group *);

/* ---- mail.c ---- */
int mail_create(tutti_group *);
int mail_run(tutti_group *, const tutti_operation *, double timeout);
void mail_submit(tutti_group *, tutti_work *, const char *where);
int mail_wait(tutti_work *, uint64_t deadline);
void mail_wake(tutti_group *); /* after an abort */
void mail_close(tutti_group *);

#endif
