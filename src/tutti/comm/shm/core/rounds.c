/* Waiting for peers in a round (rounds.h), and the error messages of failed waits. */
#include "rounds.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum mark { POSTED, CONSUMED };

static const _Atomic uint64_t *mark_of(const tutti_group *g, int rank, enum mark mark)
{
    const control *theirs = g->peers[rank].control;
    return mark == POSTED ? &theirs->posted : &theirs->consumed;
}

static uint64_t reached(const tutti_group *g, int rank, enum mark mark)
{
    return atomic_load_explicit(mark_of(g, rank, mark), memory_order_acquire);
}

static int operations_differ(tutti_group *g, int rank)
{
    char text[1024];
    if (!describe_difference(g, rank, text, sizeof text))
        snprintf(text, sizeof text,
                 "ranks %d and %d of group %s called different operations: the first difference is "
                 "more than %d operations before %s %" PRIu64,
                 g->rank, rank, g->name, TUTTI_LEDGER_ENTRIES, kind_name(g->running->kind),
                 g->running_sequence);
    return fail(TUTTI_MISMATCH, "%s", text);
}

static int timed_out(tutti_group *g, int rank, uint64_t round, enum mark mark, bool all)
{
    char late[4096] = ""; /* 4 descriptions, then at most TUTTI_MAX_RANKS numbers */
    size_t length = 0;
    int named = 0;
    for (int other = 0; other < g->size; other++) {
        if (other == g->rank || (!all && other != rank) || reached(g, other, mark) >= round)
            continue;
        char text[420];
        if (named < 4) {
            describe_peer(g, other, text, sizeof text);
            length += (size_t)snprintf(late + length, sizeof late - length, "%s%s",
                                       named ? " and " : "", text);
        } else
            length += (size_t)snprintf(late + length, sizeof late - length, "%s%d",
                                       named == 4 ? " and ranks " : ", ", other);
        named++;
    }
    return fail(TUTTI_TIMEOUT,
                "%s %" PRIu64 " of group %s (%s, %" PRIu64
                " bytes) timed out after %g s on rank %d: waiting for %s",
                kind_name(g->running->kind), g->running_sequence, g->name,
                dtype_name(g->running->dtype), operation_bytes(g->running), g->running_timeout,
                g->rank, late);
}

/* Adds the failed operation to the error message, unless the message came from a peer and already
 * names the peer's operation. */
static int name_operation(tutti_group *g, int code)
{
    if (code != TUTTI_PEER_DIED && code != TUTTI_PEER_LEFT)
        return code;
    if (strstr(tutti_error(), " of group ") && strstr(tutti_error(), ": it was needed for "))
        return code;
    return fail(code, "%s: it was needed for %s %" PRIu64 " on rank %d", tutti_error(),
                kind_name(g->running->kind), g->running_sequence, g->rank);
}

/* Sleeps until the peer posts or consumes a round, until an abort, or for at most 20 ms. The futex
 * word is read before the checks. So a change that the checks do not see increments the word after
 * this read, and futex_wait returns at once. */
static void sleep_for_peer(tutti_group *g, int rank, uint64_t round, enum mark mark)
{
    control *theirs = g->peers[rank].control;
    uint32_t seen = atomic_load_explicit(&theirs->futex, memory_order_acquire);
    atomic_fetch_add_explicit(&theirs->waiters, 1, memory_order_seq_cst);
    if (atomic_load_explicit(mark_of(g, rank, mark), memory_order_seq_cst) < round &&
        !atomic_load_explicit(&g->broken, memory_order_acquire) &&
        atomic_load_explicit(&theirs->state, memory_order_acquire) == RUNNING)
        futex_wait(&theirs->futex, seen);
    atomic_fetch_sub_explicit(&theirs->waiters, 1, memory_order_relaxed);
}

static int wait_for(tutti_group *g, int rank, uint64_t round, enum mark mark, bool all)
{
    pause_state pause = {.limit = g->limits_now};
    while (reached(g, rank, mark) < round) {
        bool should_check;
        if (!pause_awake(&pause, &should_check))
            sleep_for_peer(g, rank, round, mark);
        else if (!should_check)
            continue;
        uint64_t now = now_ns();
        bool due = alive_check_due(&pause, now);
        int code = peer_error(g, rank, due);
        if (reached(g, rank, mark) >= round)
            return 0; /* the peer arrived and then left */
        if (code)
            return name_operation(g, code);
        char unused[1024];
        if (due && describe_difference(g, rank, unused, sizeof unused))
            return operations_differ(g, rank);
        if (now >= g->running_deadline)
            return timed_out(g, rank, round, mark, all);
    }
    return 0;
}

static int check_fingerprint(tutti_group *g, int rank, uint64_t round)
{
    uint64_t theirs = atomic_load_explicit(&g->peers[rank].control->fingerprint[round % SLOTS],
                                           memory_order_relaxed);
    if ((theirs ^ g->fingerprint) & ~DIRECT)
        return operations_differ(g, rank);
    return theirs == g->fingerprint ? 0 : PATHS_DIFFER;
}

static int await_one(tutti_group *g, int rank, uint64_t round, bool all)
{
    if (reached(g, rank, POSTED) < round)
        TRY(wait_for(g, rank, round, POSTED, all));
    if (g->peers[rank].consumed < round - 1)
        g->peers[rank].consumed = round - 1;
    return check_fingerprint(g, rank, round);
}

int await_rank(tutti_group *g, int rank, uint64_t round)
{
    return await_one(g, rank, round, false);
}

int await_all(tutti_group *g, uint64_t round)
{
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank)
            TRY(await_one(g, rank, round, true));
    if (g->consumed_by_all < round - 1)
        g->consumed_by_all = round - 1;
    return 0;
}

int await_consumed(tutti_group *g, uint64_t round)
{
    if (g->consumed_by_all >= round)
        return 0;
    uint64_t lowest = UINT64_MAX;
    for (int rank = 0; rank < g->size; rank++) {
        peer *peer = &g->peers[rank];
        if (rank == g->rank)
            continue;
        if (peer->consumed < round) {
            if (reached(g, rank, CONSUMED) < round)
                TRY(wait_for(g, rank, round, CONSUMED, true));
            peer->consumed = reached(g, rank, CONSUMED);
        }
        lowest = min_u64(peer->consumed, lowest);
    }
    g->consumed_by_all = lowest;
    return 0;
}

int enter_round(tutti_group *g, uint64_t round)
{
    return round > SLOTS ? await_consumed(g, round - SLOTS) : 0;
}
