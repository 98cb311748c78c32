/* The collectives, each a sequence of rounds (rounds.h).
 *
 * Reductions take ranks in the order 0..n-1 whatever the path, so one-shot, two-shot and
 * symmetric forms give the same bits, and give them to every rank. */
#include "rounds.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define ONE_SHOT_BYTES (64 * 1024)
#define SYMMETRIC_BYTES (16 * 1024) /* below, staging costs less than a second round */
#define TILE (16 * 1024)            /* what is reduced, then copied from the L1 cache */

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void copy(void *to, const void *from, uint64_t bytes)
{
    if (bytes && to != from)
        memcpy(to, from, bytes);
}

static uint64_t rounds_for(uint64_t bytes, uint64_t chunk)
{
    return bytes <= chunk ? 1 : (bytes + chunk - 1) / chunk;
}

/* Of a part cut into chunks: the bytes of chunk i. */
static uint64_t chunk_bytes(uint64_t part, uint64_t i, uint64_t chunk)
{
    return part > i * chunk ? least(part - i * chunk, chunk) : 0;
}

/* A slot begins with a table of numbers: for operations whose sizes no single rank knows. */
static uint64_t *table_of(const tutti_group *g, int rank, uint64_t round)
{
    return (uint64_t *)slot_of(g, rank, round);
}

static unsigned char *bytes_of(const tutti_group *g, int rank, uint64_t round)
{
    return slot_of(g, rank, round) + g->table_bytes;
}

static uint64_t lane_bytes(const tutti_group *g)
{
    return g->slot_bytes / (uint64_t)(g->size - 1) / LINE * LINE;
}

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

/* Everyone stages everything and reduces everything: one round. */
static int one_shot(tutti_group *g, const void *in, void *out, uint64_t bytes)
{
    const tutti_operation *op = g->running;
    uint64_t round = g->round + 1;
    TRY(enter_round(g, round));
    copy(bytes_of(g, g->rank, round), in, bytes);
    post_round(g, round);
    TRY(await_all(g, round));
    for (int rank = 0; rank < g->size; rank++)
        g->sources[rank] = rank == g->rank ? in : bytes_of(g, rank, round);
    reduce_parts(out, g->sources, (uint32_t)g->size, bytes / dtype_bytes(op->dtype), op->dtype,
                 op->reduce);
    consume_round(g, round);
    return 0;
}

/* Reduces `bytes` at g->sources (which it moves on) into `out`, and into `also` tile by tile while
 * the tile is in the L1 cache. */
static void reduce_twice(tutti_group *g, unsigned char *out, unsigned char *also, uint64_t bytes)
{
    const tutti_operation *op = g->running;
    for (uint64_t at = 0; at < bytes; at += TILE) {
        uint64_t tile = least(bytes - at, TILE);
        reduce_parts(out + at, g->sources, (uint32_t)g->size, tile / dtype_bytes(op->dtype),
                     op->dtype, op->reduce);
        memcpy(also + at, out + at, tile);
        for (int rank = 0; rank < g->size; rank++)
            g->sources[rank] = (const unsigned char *)g->sources[rank] + tile;
    }
}

/* Chunk by chunk, each rank reduces its piece and hands it to the others. A round carries the
 * results of one chunk and the inputs of the next, so there is one wait per chunk. A slot has a
 * place per piece; nobody needs this rank's own piece of the input, so its result lies there. */
static int two_shot(tutti_group *g, const unsigned char *in, unsigned char *out, uint64_t bytes)
{
    uint64_t n = (uint64_t)g->size, me = (uint64_t)g->rank;
    uint64_t piece = g->slot_bytes / n / LINE * LINE, chunk = piece * n;
    uint64_t chunks = rounds_for(bytes, chunk), first = g->round + 1;
    for (uint64_t c = 0; c <= chunks; c++) {
        uint64_t round = first + c, here = chunk_bytes(bytes, c, chunk);
        if (c) {
            const unsigned char *mine = in + (c - 1) * chunk + me * piece;
            TRY(await_all(g, round - 1));
            for (uint64_t p = 0; p < n && c > 1; p++)
                if (p != me)
                    copy(out + (c - 2) * chunk + p * piece,
                         bytes_of(g, (int)p, round - 1) + p * piece, piece);
            TRY(enter_round(g, round));
            for (uint64_t p = 0; p < n; p++)
                g->sources[p] =
                    p == me ? mine : bytes_of(g, (int)p, round - 1) + me * piece;
            reduce_twice(g, out + (c - 1) * chunk + me * piece,
                         bytes_of(g, g->rank, round) + me * piece,
                         chunk_bytes(chunk_bytes(bytes, c - 1, chunk), me, piece));
            consume_round(g, round - 1);
        } else
            TRY(enter_round(g, round));
        for (uint64_t p = 0; p < n; p++)
            if (p != me)
                copy(bytes_of(g, g->rank, round) + p * piece, in + c * chunk + p * piece,
                     chunk_bytes(here, p, piece));
        post_round(g, round);
    }
    uint64_t last = first + chunks;
    TRY(await_all(g, last));
    for (uint64_t p = 0; p < n; p++)
        if (p != me)
            copy(out + (chunks - 1) * chunk + p * piece, bytes_of(g, (int)p, last) + p * piece,
                 chunk_bytes(chunk_bytes(bytes, chunks - 1, chunk), p, piece));
    consume_round(g, last);
    return 0;
}

static int all_reduce(tutti_group *g, const tutti_operation *op)
{
    if (op->in_bytes[0] <= least(ONE_SHOT_BYTES, g->slot_bytes))
        return one_shot(g, op->in[0], op->out[0], op->in_bytes[0]);
    return two_shot(g, op->in[0], op->out[0], op->in_bytes[0]);
}

static int reduce(tutti_group *g, const tutti_operation *op)
{
    uint64_t bytes = op->in_bytes[0], chunk = g->slot_bytes, rounds = rounds_for(bytes, chunk);
    const unsigned char *in = op->in[0];
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        uint64_t here = chunk_bytes(bytes, i, chunk);
        TRY(enter_round(g, round));
        if (g->rank != op->root)
            copy(bytes_of(g, g->rank, round), in + i * chunk, here);
        post_round(g, round);
        if (g->rank == op->root) {
            TRY(await_all(g, round));
            for (int rank = 0; rank < g->size; rank++)
                g->sources[rank] = rank == g->rank ? in + i * chunk : bytes_of(g, rank, round);
            reduce_parts((unsigned char *)op->out[0] + i * chunk, g->sources, (uint32_t)g->size,
                         here / dtype_bytes(op->dtype), op->dtype, op->reduce);
        }
        consume_round(g, round);
    }
    return 0;
}

static int broadcast(tutti_group *g, const tutti_operation *op)
{
    bool root = g->rank == op->root;
    uint64_t bytes = root ? op->in_bytes[0] : op->out_bytes[0];
    uint64_t chunk = g->slot_bytes, rounds = rounds_for(bytes, chunk);
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        uint64_t here = chunk_bytes(bytes, i, chunk);
        TRY(enter_round(g, round));
        if (root)
            copy(bytes_of(g, g->rank, round), (const unsigned char *)op->in[0] + i * chunk, here);
        post_round(g, round);
        if (!root) {
            TRY(await_rank(g, op->root, round));
            copy((unsigned char *)op->out[0] + i * chunk, bytes_of(g, op->root, round), here);
        }
        consume_round(g, round);
    }
    return 0;
}

static uint64_t largest(const uint64_t *bytes, uint32_t n)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < n; i++)
        most = bytes[i] > most ? bytes[i] : most;
    return most;
}

static int all_gather(tutti_group *g, const tutti_operation *op)
{
    uint64_t chunk = g->slot_bytes, rounds = rounds_for(largest(op->out_bytes, op->out_parts), chunk);
    const unsigned char *in = op->in[0];
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        TRY(enter_round(g, round));
        uint64_t mine = chunk_bytes(op->in_bytes[0], i, chunk);
        copy(bytes_of(g, g->rank, round), in + i * chunk, mine);
        post_round(g, round);
        copy((unsigned char *)op->out[g->rank] + i * chunk, in + i * chunk, mine);
        for (int step = 1; step < g->size; step++) { /* not all from the same rank at once */
            int rank = (g->rank + step) % g->size;
            TRY(await_rank(g, rank, round));
            copy((unsigned char *)op->out[rank] + i * chunk, bytes_of(g, rank, round),
                 chunk_bytes(op->out_bytes[rank], i, chunk));
        }
        consume_round(g, round);
    }
    return 0;
}

static void stage_lanes(tutti_group *g, const tutti_operation *op, uint64_t i, uint64_t round)
{
    uint64_t share = lane_bytes(g);
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank)
            copy(bytes_of(g, g->rank, round) + lane(g->rank, rank) * share,
                 (const unsigned char *)op->in[rank] + i * share,
                 chunk_bytes(op->in_bytes[rank], i, share));
}

static int reduce_scatter(tutti_group *g, const tutti_operation *op)
{
    uint64_t share = lane_bytes(g), rounds = rounds_for(largest(op->in_bytes, op->in_parts), share);
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        TRY(enter_round(g, round));
        stage_lanes(g, op, i, round);
        post_round(g, round);
        TRY(await_all(g, round));
        for (int rank = 0; rank < g->size; rank++)
            g->sources[rank] = rank == g->rank
                                   ? (const unsigned char *)op->in[rank] + i * share
                                   : bytes_of(g, rank, round) + lane(rank, g->rank) * share;
        uint64_t here = chunk_bytes(op->out_bytes[0], i, share);
        if (here)
            reduce_parts((unsigned char *)op->out[0] + i * share, g->sources, (uint32_t)g->size,
                         here / dtype_bytes(op->dtype), op->dtype, op->reduce);
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
            copy(bytes_of(g, g->rank, round), (const unsigned char *)op->in[0] + i * chunk,
                 chunk_bytes(op->in_bytes[0], i, chunk));
        post_round(g, round);
        if (!root && i == 0) {
            TRY(await_rank(g, op->root, round));
            rounds = table_of(g, op->root, round)[0];
        }
        for (int rank = 0; root && rank < g->size; rank++) {
            uint64_t here = chunk_bytes(op->out_bytes[rank], i, chunk);
            if (rank == g->rank) {
                copy((unsigned char *)op->out[rank] + i * chunk,
                     (const unsigned char *)op->in[0] + i * chunk, here);
                continue;
            }
            TRY(await_rank(g, rank, round));
            if (i == 0 && table_of(g, rank, round)[1] != op->out_bytes[rank])
                return size_mismatch(g, rank, table_of(g, rank, round)[1], g->rank,
                                     op->out_bytes[rank]);
            copy((unsigned char *)op->out[rank] + i * chunk, bytes_of(g, rank, round), here);
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
            copy(out, (const unsigned char *)op->in[g->rank] + i * share, here);
        else {
            TRY(await_rank(g, op->root, round));
            const uint64_t *table = table_of(g, op->root, round);
            if (i == 0) {
                rounds = table[0];
                if (table[1 + g->rank] != op->out_bytes[0])
                    return size_mismatch(g, op->root, table[1 + g->rank], g->rank,
                                         op->out_bytes[0]);
            }
            copy(out, bytes_of(g, op->root, round) + lane(op->root, g->rank) * share, here);
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
        copy((unsigned char *)op->out[g->rank] + i * share,
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
            copy((unsigned char *)op->out[rank] + i * share,
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

static int dispatch(tutti_group *g, const tutti_operation *op)
{
    if (g->size == 1)
        return alone(op);
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

int run_collective(tutti_group *g, const tutti_operation *op, uint64_t sequence, uint64_t entry,
                   double timeout, uint64_t deadline)
{
    g->running = op;
    g->running_sequence = sequence;
    g->running_timeout = timeout;
    g->running_deadline = deadline;
    g->print = mix(g->print, operation_print(op)) & ~(uint64_t)1;
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
