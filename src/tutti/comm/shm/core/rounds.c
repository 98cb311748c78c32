/* Waiting for peers in a round, and saying whom a wait was for when it fails. */
#include "rounds.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum wanted { POSTED, CONSUMED };

static uint64_t reached(const tutti_group *g, int rank, enum wanted wanted)
{
    const control *theirs = g->peers[rank].control;
    return atomic_load_explicit(wanted == POSTED ? &theirs->posted : &theirs->consumed,
                                memory_order_acquire);
}

static int differs(tutti_group *g, int rank)
{
    char text[1024];
    if (!describe_difference(g, rank, text, sizeof text))
        snprintf(text, sizeof text,
                 "ranks %d and %d of group %s called different operations, more than %d before "
                 "%s %" PRIu64,
                 g->rank, rank, g->name, TUTTI_LEDGER_ENTRIES, kind_name(g->running->kind),
                 g->running_sequence);
    return fail(TUTTI_MISMATCH, "%s", text);
}

static int timed_out(tutti_group *g, int rank, uint64_t round, enum wanted wanted, bool all)
{
    char late[2048] = "";
    size_t length = 0;
    int named = 0, more = 0;
    for (int other = 0; other < g->size; other++) {
        if (other == g->rank || (!all && other != rank) || reached(g, other, wanted) >= round)
            continue;
        if (named == 4) {
            more++;
            continue;
        }
        char text[420];
        describe_peer(g, other, text, sizeof text);
        length += (size_t)snprintf(late + length, sizeof late - length, "%s%s",
                                   named ? " and " : "", text);
        named++;
    }
    if (more)
        snprintf(late + length, sizeof late - length, " and %d more", more);
    return fail(TUTTI_TIMEOUT,
                "%s %" PRIu64 " of group %s (%s, %" PRIu64
                " bytes) timed out after %.1f s on rank %d: waiting for %s",
                kind_name(g->running->kind), g->running_sequence, g->name,
                dtype_name(g->running->dtype), operation_bytes(g->running), g->running_timeout,
                g->rank, late);
}

static int in_words(tutti_group *g, int code)
{
    if (code != TUTTI_PEER_DIED && code != TUTTI_PEER_LEFT)
        return code;
    if (strstr(tutti_error(), " of group ") && strstr(tutti_error(), ": it was needed for "))
        return code; /* a peer's words */
    return fail(code, "%s: it was needed for %s %" PRIu64 " on rank %d", tutti_error(),
                kind_name(g->running->kind), g->running_sequence, g->rank);
}

/* Or for a while: whoever calls looks again. */
static void sleep_until(tutti_group *g, int rank, uint64_t round, enum wanted wanted)
{
    control *theirs = g->peers[rank].control;
    const _Atomic uint64_t *mark = wanted == POSTED ? &theirs->posted : &theirs->consumed;
    uint32_t heard = atomic_load_explicit(&theirs->bell, memory_order_acquire);
    atomic_fetch_add_explicit(&theirs->sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(mark, memory_order_seq_cst) < round)
        sleep_on_bell(&theirs->bell, heard);
    atomic_fetch_sub_explicit(&theirs->sleepers, 1, memory_order_relaxed);
}

static int wait_for(tutti_group *g, int rank, uint64_t round, enum wanted wanted, bool all)
{
    pause_state pause = {.limit = g->patience_now};
    while (reached(g, rank, wanted) < round) {
        bool should_look;
        if (!pause_awake(&pause, &should_look))
            sleep_until(g, rank, round, wanted);
        else if (!should_look)
            continue;
        uint64_t now = now_ns();
        bool due = life_check_is_due(&pause, now);
        int code = peer_trouble(g, rank, due);
        if (reached(g, rank, wanted) >= round)
            return 0; /* it came, then left */
        if (code)
            return in_words(g, code);
        char unused[1024];
        if (due && describe_difference(g, rank, unused, sizeof unused))
            return differs(g, rank);
        if (now >= g->running_deadline)
            return timed_out(g, rank, round, wanted, all);
    }
    return 0;
}

static int check_print(tutti_group *g, int rank, uint64_t round)
{
    uint64_t theirs = atomic_load_explicit(&g->peers[rank].control->print[round % SLOTS],
                                           memory_order_relaxed);
    if ((theirs ^ g->print) & ~SYMMETRIC)
        return differs(g, rank);
    return theirs == g->print ? 0 : OTHERWISE;
}

static int await_one(tutti_group *g, int rank, uint64_t round, bool all)
{
    if (reached(g, rank, POSTED) < round)
        TRY(wait_for(g, rank, round, POSTED, all));
    if (g->peers[rank].consumed < round - 1)
        g->peers[rank].consumed = round - 1;
    return check_print(g, rank, round);
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
    uint64_t least = UINT64_MAX;
    for (int rank = 0; rank < g->size; rank++) {
        peer *peer = &g->peers[rank];
        if (rank == g->rank)
            continue;
        if (peer->consumed < round) {
            if (reached(g, rank, CONSUMED) < round)
                TRY(wait_for(g, rank, round, CONSUMED, true));
            peer->consumed = reached(g, rank, CONSUMED);
        }
        if (peer->consumed < least)
            least = peer->consumed;
    }
    g->consumed_by_all = least;
    return 0;
}

int enter_round(tutti_group *g, uint64_t round)
{
    return round > SLOTS ? await_consumed(g, round - SLOTS) : 0;
}
