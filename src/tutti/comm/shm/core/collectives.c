/* The collectives that move bytes, each a sequence of rounds (rounds.h), and the running of any. */
#include "chunks.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define UNCACHED_BYTES (8 * 1024 * 1024)

static int size_mismatch(const tutti_group *g, int giver, uint64_t given, int taker, uint64_t taken)
{
    return fail(TUTTI_MISMATCH,
                "%s %" PRIu64 " of group %s differs between ranks: rank %d gives %" PRIu64
                " bytes to rank %d, which takes %" PRIu64,
                kind_name(g->running->kind), g->running_sequence, g->name, giver, given, taker,
                taken);
}

static int barrier(tutti_group *g)
{
    uint64_t round = g->round + 1;
    TRY(enter_round(g, round));
    post_round(g, round);
    TRY(await_all(g, round));
    consume_round(g, round);
    return 0;
}

static int broadcast(tutti_group *g, const tutti_operation *op)
{
    bool root = g->rank == op->root;
    uint64_t bytes = root ? op->in_bytes[0] : op->out_bytes[0];
    uint64_t chunk = flow_chunk(g, bytes), rounds = rounds_for(bytes, chunk);
    if (root && (g->print & SYMMETRIC))
        return direct_broadcast_root(g);
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        uint64_t here = chunk_bytes(bytes, i, chunk);
        TRY(enter_round(g, round));
        if (root)
            hand_over(&g->crossing, bytes_of(g, g->rank, round),
                      (const unsigned char *)op->in[0] + i * chunk, here);
        post_round(g, round);
        if (!root) {
            int code = await_rank(g, op->root, round);
            if (code == OTHERWISE)
                return direct_broadcast_rest(g, op);
            TRY(code);
            take(g, (unsigned char *)op->out[0] + i * chunk, bytes_of(g, op->root, round), here);
        }
        consume_round(g, round);
    }
    return 0;
}

static int all_gather(tutti_group *g, const tutti_operation *op)
{
    uint64_t chunk = g->slot_bytes;
    uint64_t rounds = rounds_for(largest(op->out_bytes, op->out_parts), chunk);
    const unsigned char *in = op->in[0];
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        TRY(enter_round(g, round));
        uint64_t mine = chunk_bytes(op->in_bytes[0], i, chunk);
        hand_over(&g->crossing, bytes_of(g, g->rank, round), in + i * chunk, mine);
        post_round(g, round);
        take(g, (unsigned char *)op->out[g->rank] + i * chunk, in + i * chunk, mine);
        for (int step = 1; step < g->size; step++) { /* not all from the same rank at once */
            int rank = (g->rank + step) % g->size;
            TRY(await_rank(g, rank, round));
            take(g, (unsigned char *)op->out[rank] + i * chunk, bytes_of(g, rank, round),
                 chunk_bytes(op->out_bytes[rank], i, chunk));
        }
        consume_round(g, round);
    }
    return 0;
}

/* The root alone knows all sizes: it tells the number of rounds in its table. */
static int gather(tutti_group *g, const tutti_operation *op)
{
    uint64_t chunk = g->slot_bytes, rounds = 1;
    bool root = g->rank == op->root;
    if (root)
        rounds = rounds_for(largest(op->out_bytes, op->out_parts), chunk);
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        TRY(enter_round(g, round));
        if (i == 0) {
            table_of(g, g->rank, round)[0] = rounds;
            table_of(g, g->rank, round)[1] = op->in_bytes[0];
        }
        if (!root)
            hand_over(&g->crossing, bytes_of(g, g->rank, round),
                      (const unsigned char *)op->in[0] + i * chunk,
                      chunk_bytes(op->in_bytes[0], i, chunk));
        post_round(g, round);
        if (!root && i == 0) {
            TRY(await_rank(g, op->root, round));
            rounds = table_of(g, op->root, round)[0];
        }
        for (int rank = 0; root && rank < g->size; rank++) {
            uint64_t here = chunk_bytes(op->out_bytes[rank], i, chunk);
            if (rank == g->rank) {
                take(g, (unsigned char *)op->out[rank] + i * chunk,
                     (const unsigned char *)op->in[0] + i * chunk, here);
                continue;
            }
            TRY(await_rank(g, rank, round));
            if (i == 0 && table_of(g, rank, round)[1] != op->out_bytes[rank])
                return size_mismatch(g, rank, table_of(g, rank, round)[1], g->rank,
                                     op->out_bytes[rank]);
            take(g, (unsigned char *)op->out[rank] + i * chunk, bytes_of(g, rank, round), here);
        }
        consume_round(g, round);
    }
    return 0;
}

static int scatter(tutti_group *g, const tutti_operation *op)
{
    uint64_t share = lane_bytes(g), rounds = 1;
    bool root = g->rank == op->root;
    if (root)
        rounds = rounds_for(largest(op->in_bytes, op->in_parts), share);
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        TRY(enter_round(g, round));
        if (root) {
            if (i == 0) {
                table_of(g, g->rank, round)[0] = rounds;
                memcpy(table_of(g, g->rank, round) + 1, op->in_bytes, 8 * (size_t)g->size);
            }
            stage_lanes(g, op, i, round);
        }
        post_round(g, round);
        uint64_t here = chunk_bytes(op->out_bytes[0], i, share);
        unsigned char *out = (unsigned char *)op->out[0] + i * share;
        if (root)
            take(g, out, (const unsigned char *)op->in[g->rank] + i * share, here);
        else {
            TRY(await_rank(g, op->root, round));
            const uint64_t *table = table_of(g, op->root, round);
            if (i == 0) {
                rounds = table[0];
                if (table[1 + g->rank] != op->out_bytes[0])
                    return size_mismatch(g, op->root, table[1 + g->rank], g->rank,
                                         op->out_bytes[0]);
            }
            take(g, out, bytes_of(g, op->root, round) + lane(op->root, g->rank) * share, here);
        }
        consume_round(g, round);
    }
    return 0;
}

static int all_to_all(tutti_group *g, const tutti_operation *op)
{
    uint64_t share = lane_bytes(g), rounds = rounds_for(largest(op->in_bytes, op->in_parts), share);
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        TRY(enter_round(g, round));
        if (i == 0) {
            table_of(g, g->rank, round)[0] = rounds;
            memcpy(table_of(g, g->rank, round) + 1, op->in_bytes, 8 * (size_t)g->size);
        }
        stage_lanes(g, op, i, round);
        post_round(g, round);
        take(g, (unsigned char *)op->out[g->rank] + i * share,
             (const unsigned char *)op->in[g->rank] + i * share,
             chunk_bytes(op->in_bytes[g->rank], i, share));
        for (int step = 1; step < g->size; step++) {
            int rank = (g->rank + step) % g->size;
            TRY(await_rank(g, rank, round));
            if (i == 0) {
                const uint64_t *table = table_of(g, rank, round);
                if (table[1 + g->rank] != op->out_bytes[rank])
                    return size_mismatch(g, rank, table[1 + g->rank], g->rank, op->out_bytes[rank]);
                if (table[0] > rounds)
                    rounds = table[0];
            }
            take(g, (unsigned char *)op->out[rank] + i * share,
                 bytes_of(g, rank, round) + lane(rank, g->rank) * share,
                 chunk_bytes(op->out_bytes[rank], i, share));
        }
        consume_round(g, round);
    }
    return 0;
}

static int alone(const tutti_operation *op)
{
    if (op->in_parts && op->out_parts)
        reduce_parts(op->out[0], op->in, 1,
                     op->in_bytes[0] / dtype_bytes(op->dtype), op->dtype, op->reduce);
    return 0;
}

static int staged(tutti_group *g, const tutti_operation *op)
{
    switch (op->kind) {
    case TUTTI_BARRIER: return barrier(g);
    case TUTTI_ALL_REDUCE: return all_reduce(g, op);
    case TUTTI_REDUCE: return reduce(g, op);
    case TUTTI_BROADCAST: return broadcast(g, op);
    case TUTTI_ALL_GATHER: return all_gather(g, op);
    case TUTTI_REDUCE_SCATTER: return reduce_scatter(g, op);
    case TUTTI_GATHER: return gather(g, op);
    case TUTTI_SCATTER: return scatter(g, op);
    default: return all_to_all(g, op);
    }
}

static int direct(tutti_group *g, const tutti_operation *op)
{
    switch (op->kind) {
    case TUTTI_ALL_REDUCE: return direct_all_reduce(g, op);
    case TUTTI_ALL_GATHER: return direct_all_gather(g, op);
    case TUTTI_REDUCE_SCATTER: return direct_reduce_scatter(g, op);
    default: return staged(g, op); /* a broadcast: only its root needs symmetric memory */
    }
}

/* Some ranks have their tensor in symmetric memory, some have not, and all have found out in the
 * first round: they begin again, all staging. */
static int dispatch(tutti_group *g, const tutti_operation *op)
{
    if (g->size == 1)
        return alone(op);
    uint64_t first = g->round + 1;
    int code = offer_memory(g, op) ? direct(g, op) : staged(g, op);
    if (code != OTHERWISE)
        return code;
    consume_round(g, first);
    g->print &= ~SYMMETRIC;
    return staged(g, op);
}

/* An ordinary store to a line that is in no cache reads it first; for results that no cache will
 * hold, stores past the caches save that. Not for results that replace what was just read, nor
 * between near cores (copy.c), where they were measured as twice slower. */
static bool results_pass_caches(const tutti_group *g, const tutti_operation *op)
{
    bool in_place = op->in_parts == 1 && op->out_parts == 1 && op->in[0] == op->out[0];
    return g->crossing.dear && !in_place && operation_bytes(op) >= UNCACHED_BYTES;
}

int run_collective(tutti_group *g, const tutti_operation *op, uint64_t sequence, uint64_t entry,
                   double timeout, uint64_t deadline)
{
    g->running = op;
    g->running_sequence = sequence;
    g->running_timeout = timeout;
    g->running_deadline = deadline;
    g->print = mix(g->print & ~SYMMETRIC, operation_print(op)) & ~SYMMETRIC;
    g->past_caches = results_pass_caches(g, op);
    int code = dispatch(g, op);
    if (code < 0) {
        char text[8192];
        snprintf(text, sizeof text, "%s", tutti_error());
        code = break_group(g, code, text);
    }
    g->running = NULL;
    ledger_mark(g, entry, code < 0 ? TUTTI_FAILED : TUTTI_DONE);
    return code;
}
