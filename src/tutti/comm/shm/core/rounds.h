/* Rounds: the protocol by which ranks exchange the bytes of collectives, and the layout of staging
 * slots.
 *
 * Rounds are numbered from 1. The numbers are the same on all ranks, because every rank derives the
 * same number of rounds from the same operation. In round k a rank
 *   enters     waits until all peers have consumed round k - SLOTS,
 *   stages     writes bytes for its peers into its slot k % SLOTS,
 *   posts      publishes posted = k (release),
 *   awaits     waits for posted >= k (acquire) of the peers that it needs, reads their slots,
 *   consumes   publishes consumed = k (release),
 * and only then begins round k + 1.
 *
 * No byte is read too early: the reader's acquire load of posted >= k reads from the peer's release
 * store of k or of a later round. So all staging of round k happens before the read. (Different
 * threads of a rank may run a group's operations one after another. The group's mutex orders these
 * threads.)
 *
 * No byte is overwritten too early: the slot of round k - SLOTS is written again in round k, after
 * an acquire load of consumed >= k - SLOTS of every peer. Each peer stores that value (release)
 * after its last read of the slot. posted >= j implies consumed >= j - 1, because every rank
 * consumes round j - 1 before it posts round j. So in operations in which all ranks wait for all
 * others, the `consumed` cache line is never read. The same bound of SLOTS rounds protects
 * `fingerprint` and `offer`, which are indexed by round. The argument uses release and acquire
 * only, so it holds on ARM64 as well as on x86-64.
 *
 * No wake-up is lost: a waiter increments `waiters` and then loads `posted` (or `consumed`) again.
 * The owner stores `posted` (or `consumed`) and then loads `waiters`. All four accesses are
 * sequentially consistent, so at least one side sees the other: either the waiter sees the new
 * round and does not sleep, or the owner sees the waiter and increments the futex word. In the
 * second case, the owner's load of `waiters` also synchronizes with the waiter's increment of
 * `waiters`, which follows the waiter's read of the futex word. So the owner increments the futex
 * word after that read, and the kernel refuses to let the waiter sleep on the old value. */
#ifndef TUTTI_ROUNDS_H
#define TUTTI_ROUNDS_H

#include "internal.h"

#define DIRECT ((uint64_t)1) /* bit of a fingerprint: this rank offers memory for direct access */
/* Result of a wait if only one of the two ranks, this rank or the peer, offers memory. */
#define PATHS_DIFFER 1

int enter_round(tutti_group *, uint64_t round);
int await_rank(tutti_group *, int rank, uint64_t round);
int await_all(tutti_group *, uint64_t round);
/* Waits until all peers have consumed a round. After that no peer reads the bytes of the round. */
int await_consumed(tutti_group *, uint64_t round);

static inline void wake_waiters(control *own)
{
    if (atomic_load_explicit(&own->waiters, memory_order_seq_cst))
        futex_wake_all(&own->futex);
}

static inline void post_round(tutti_group *g, uint64_t round)
{
    control *own = g->peers[g->rank].control;
    atomic_store_explicit(&own->fingerprint[round % SLOTS], g->fingerprint, memory_order_relaxed);
    atomic_store_explicit(&own->posted, round, memory_order_seq_cst);
    wake_waiters(own);
}

static inline void consume_round(tutti_group *g, uint64_t round)
{
    control *own = g->peers[g->rank].control;
    atomic_store_explicit(&own->consumed, round, memory_order_seq_cst);
    wake_waiters(own);
    g->round = round;
}

#define TRY(expression)                                                                            \
    do {                                                                                           \
        int try_code = (expression);                                                               \
        if (try_code)                                                                              \
            return try_code;                                                                       \
    } while (0)

/* ---- Chunks and slots ---- */

/* Copies bytes into the caller's result. */
static inline void copy_result(const tutti_group *g, void *to, const void *from, uint64_t bytes)
{
    if (!bytes || to == from)
        return;
    if (g->stream_results) {
        stream_bytes(to, from, bytes);
        stream_fence();
    } else
        copy_bytes(to, from, bytes);
}

static inline uint64_t rounds_for(uint64_t bytes, uint64_t chunk)
{
    return bytes <= chunk ? 1 : (bytes + chunk - 1) / chunk;
}

/* Chunk size for bytes that flow in one direction. There are several chunks, so that sender and
 * receiver copy at the same time. If possible there are no more chunks than slots, so that the
 * sender need not wait. */
static inline uint64_t flow_chunk(const tutti_group *g, uint64_t bytes)
{
    uint64_t min_chunk = 64 * 1024, chunk = (bytes / SLOTS + LINE - 1) / LINE * LINE;
    return min_u64(chunk < min_chunk ? min_chunk : chunk, g->slot_bytes);
}

/* Bytes of chunk i of a part. */
static inline uint64_t chunk_bytes(uint64_t part, uint64_t i, uint64_t chunk)
{
    return part > i * chunk ? min_u64(part - i * chunk, chunk) : 0;
}

/* A slot begins with a table of sizes, for operations in which no rank knows all sizes. */
static inline uint64_t *table_of(const tutti_group *g, int rank, uint64_t round)
{
    return (uint64_t *)slot_of(g, rank, round);
}

static inline unsigned char *bytes_of(const tutti_group *g, int rank, uint64_t round)
{
    return slot_of(g, rank, round) + g->table_bytes;
}

/* Bytes of each peer's share of a slot, for operations that divide a slot among the peers. */
static inline uint64_t lane_bytes(const tutti_group *g)
{
    return g->slot_bytes / (uint64_t)(g->size - 1) / LINE * LINE;
}

/* ---- direct.c: these functions return PATHS_DIFFER if not all ranks offer memory ---- */
bool offer_memory(tutti_group *, const tutti_operation *);
int direct_all_reduce(tutti_group *, const tutti_operation *);
int direct_all_gather(tutti_group *, const tutti_operation *);
int direct_reduce_scatter(tutti_group *, const tutti_operation *);
int direct_broadcast_root(tutti_group *);
int direct_broadcast_receiver(tutti_group *, const tutti_operation *);

#endif
