/* Rounds: the one mechanism by which ranks hand each other bytes.
 *
 * Rounds are numbered from 1, alike on all ranks, because every rank derives the same number of
 * rounds from the same operation. In round k a rank
 *   enters     waits until all peers have consumed round k - SLOTS,
 *   stages     writes bytes for others into its slot k % SLOTS,
 *   posts      publishes posted = k (release),
 *   awaits     waits for posted >= k (acquire) of those peers whose slots it needs, and reads them,
 *   consumes   publishes consumed = k (release),
 * and only then begins round k + 1.
 *
 * Why no byte is read too early: the reader's acquire load of posted >= k reads from the release
 * store of k or of a later round by the same thread of control, so all staging of round k happens
 * before the read. (Who runs a group's operations may change from thread to thread; the group's
 * mutex orders them.) Why none is overwritten too early: the slot of round k - SLOTS is written
 * again in round k, after an acquire load of consumed >= k - SLOTS of every peer; each peer's
 * release store of it comes after its last read of that slot. A posted >= j serves as proof of
 * consumed >= j - 1, because every rank consumes j - 1 before it posts j, so in operations where
 * all wait for all the line of `consumed` is never read. The same bound of SLOTS rounds keeps
 * `print` and `place`, which are kept by round, from being overwritten before they are read.
 * This needs release and acquire only, so it holds for ARM64 as for x86-64.
 *
 * Why no sleeper sleeps through: it counts itself in `sleepers` and then looks at `posted` once
 * more; the owner publishes `posted` and then looks at `sleepers`. All four are sequentially
 * consistent, so one of the two sees the other: either the sleeper need not sleep, or the owner
 * rings, and a bell that rang after the sleeper had heard it last keeps the kernel from letting it
 * sleep. */
#ifndef TUTTI_ROUNDS_H
#define TUTTI_ROUNDS_H

#include "internal.h"

#define SYMMETRIC ((uint64_t)1) /* in a print: this rank offers memory that all have mapped */
#define OTHERWISE 1 /* returned by a wait: the peer offers symmetric memory and this rank does not,
                     * or the other way round */

int enter_round(tutti_group *, uint64_t round);
int await_rank(tutti_group *, int rank, uint64_t round);
int await_all(tutti_group *, uint64_t round);
/* Waits until all have consumed a round: nobody will read what it offered. */
int await_consumed(tutti_group *, uint64_t round);

static inline void wake_sleepers(control *own)
{
    if (atomic_load_explicit(&own->sleepers, memory_order_seq_cst))
        ring_bell(&own->bell);
}

static inline void post_round(tutti_group *g, uint64_t round)
{
    control *own = g->peers[g->rank].control;
    atomic_store_explicit(&own->print[round % SLOTS], g->print, memory_order_relaxed);
    atomic_store_explicit(&own->posted, round, memory_order_seq_cst);
    wake_sleepers(own);
}

static inline void consume_round(tutti_group *g, uint64_t round)
{
    control *own = g->peers[g->rank].control;
    atomic_store_explicit(&own->consumed, round, memory_order_seq_cst);
    wake_sleepers(own);
    g->round = round;
}

#define TRY(expression)                                                                            \
    do {                                                                                           \
        int try_code = (expression);                                                               \
        if (try_code)                                                                              \
            return try_code;                                                                       \
    } while (0)

#endif
