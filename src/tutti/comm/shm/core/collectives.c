/* The collectives. Each collective is a sequence of rounds (rounds.h), with bytes staged in shared
 * slots.
 *
 * All reductions combine the ranks' elements in rank order, 0 to size - 1. Therefore the one-shot,
 * two-shot and direct (direct.c) algorithms give bitwise equal results, on all ranks. */
#include "rounds.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define STREAMED_BYTES (8 * 1024 * 1024) /* results of this size do not fit into the caches */
#ifndef ONE_SHOT_BYTES
#define ONE_SHOT_BYTES (128 * 1024) /* if a rank reads more bytes from peers, two_shot is faster */
#endif

static int size_mismatch(const tutti_group *g, int sender, uint64_t sent, int receiver,
                         uint64_t expected)
{
    return fail(TUTTI_MISMATCH,
                "%s %" PRIu64 " of group %s differs between ranks: rank %d sends %" PRIu64
                " bytes to rank %d, which expects %" PRIu64,
                kind_name(g->running->kind), g->running_sequence, g->name, sender, sent, receiver,
                expected);
}

static uint64_t largest(const uint64_t *bytes, uint32_t n)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < n; i++)
        most = bytes[i] > most ? bytes[i] : most;
    return most;
}

/* Stages the bytes of chunk i for each peer. */
static void stage_lanes(tutti_group *g, const tutti_operation *op, uint64_t i, uint64_t round)
{
    uint64_t share = lane_bytes(g);
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank)
            copy_to_peer(&g->sampler, bytes_of(g, g->rank, round) + lane(g->rank, rank) * share,
                      (const unsigned char *)op->in[rank] + i * share,
                      chunk_bytes(op->in_bytes[rank], i, share));
}

/* ---- Collectives that move bytes ---- */

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
    if (root && (g->fingerprint & DIRECT))
        return direct_broadcast_root(g);
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        uint64_t here = chunk_bytes(bytes, i, chunk);
        TRY(enter_round(g, round));
        if (root)
            copy_to_peer(&g->sampler, bytes_of(g, g->rank, round),
                      (const unsigned char *)op->in[0] + i * chunk, here);
        post_round(g, round);
        if (!root) {
            int code = await_rank(g, op->root, round);
            if (code == PATHS_DIFFER)
                return direct_broadcast_receiver(g, op);
            TRY(code);
            copy_result(g, (unsigned char *)op->out[0] + i * chunk, bytes_of(g, op->root, round), here);
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
        uint64_t bytes = chunk_bytes(op->in_bytes[0], i, chunk);
        copy_to_peer(&g->sampler, bytes_of(g, g->rank, round), in + i * chunk, bytes);
        post_round(g, round);
        copy_result(g, (unsigned char *)op->out[g->rank] + i * chunk, in + i * chunk, bytes);
        for (int step = 1; step < g->size; step++) { /* ranks begin with different peers */
            int rank = (g->rank + step) % g->size;
            TRY(await_rank(g, rank, round));
            copy_result(g, (unsigned char *)op->out[rank] + i * chunk, bytes_of(g, rank, round),
                 chunk_bytes(op->out_bytes[rank], i, chunk));
        }
        consume_round(g, round);
    }
    return 0;
}

/* Only the root knows all sizes, so the other ranks read the number of rounds from the root's
 * table. */
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
            copy_to_peer(&g->sampler, bytes_of(g, g->rank, round),
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
                copy_result(g, (unsigned char *)op->out[rank] + i * chunk,
                     (const unsigned char *)op->in[0] + i * chunk, here);
                continue;
            }
            TRY(await_rank(g, rank, round));
            if (i == 0 && table_of(g, rank, round)[1] != op->out_bytes[rank])
                return size_mismatch(g, rank, table_of(g, rank, round)[1], g->rank,
                                     op->out_bytes[rank]);
            copy_result(g, (unsigned char *)op->out[rank] + i * chunk, bytes_of(g, rank, round), here);
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
            copy_result(g, out, (const unsigned char *)op->in[g->rank] + i * share, here);
        else {
            TRY(await_rank(g, op->root, round));
            const uint64_t *table = table_of(g, op->root, round);
            if (i == 0) {
                rounds = table[0];
                if (table[1 + g->rank] != op->out_bytes[0])
                    return size_mismatch(g, op->root, table[1 + g->rank], g->rank,
                                         op->out_bytes[0]);
            }
            copy_result(g, out, bytes_of(g, op->root, round) + lane(op->root, g->rank) * share, here);
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
        copy_result(g, (unsigned char *)op->out[g->rank] + i * share,
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
            copy_result(g, (unsigned char *)op->out[rank] + i * share,
                 bytes_of(g, rank, round) + lane(rank, g->rank) * share,
                 chunk_bytes(op->out_bytes[rank], i, share));
        }
        consume_round(g, round);
    }
    return 0;
}

/* ---- Collectives that reduce ---- */

/* One round: every rank stages its whole input, and then reduces the inputs of all ranks. */
static int one_shot(tutti_group *g, const void *in, void *out, uint64_t bytes)
{
    const tutti_operation *op = g->running;
    uint64_t round = g->round + 1;
    TRY(enter_round(g, round));
    copy_to_peer(&g->sampler, bytes_of(g, g->rank, round), in, bytes);
    post_round(g, round);
    TRY(await_all(g, round));
    for (int rank = 0; rank < g->size; rank++)
        g->sources[rank] = rank == g->rank ? in : bytes_of(g, rank, round);
    reduce_parts(out, g->sources, (uint32_t)g->size, bytes / dtype_bytes(op->dtype), op->dtype,
                 op->reduce);
    consume_round(g, round);
    return 0;
}

/* Reduce-scatter and all-gather, chunk by chunk: each rank reduces its piece of a chunk and
 * publishes the result. A round carries the results of one chunk and the inputs of the next chunk,
 * so there is one wait per chunk. A slot has space for each piece of a chunk. No peer needs this
 * rank's own piece of the input, so the space of this piece holds this rank's result. */
static int two_shot(tutti_group *g, const unsigned char *in, unsigned char *out, uint64_t bytes)
{
    uint64_t n = (uint64_t)g->size, me = (uint64_t)g->rank;
    /* Divide the bytes into as few chunks as possible, and make these chunks nearly equal. */
    uint64_t max_chunk = g->slot_bytes / n / LINE * LINE * n;
    uint64_t min_chunks = rounds_for(bytes, max_chunk);
    uint64_t piece = ((bytes + min_chunks - 1) / min_chunks + n - 1) / n;
    piece = (piece + LINE - 1) / LINE * LINE;
    uint64_t chunk = piece * n, chunks = rounds_for(bytes, chunk), first = g->round + 1;
    for (uint64_t c = 0; c <= chunks; c++) {
        uint64_t round = first + c, here = chunk_bytes(bytes, c, chunk);
        if (c) {
            const unsigned char *own_piece = in + (c - 1) * chunk + me * piece;
            TRY(await_all(g, round - 1));
            for (uint64_t p = 0; p < n && c > 1; p++)
                if (p != me)
                    copy_result(g, out + (c - 2) * chunk + p * piece,
                         bytes_of(g, (int)p, round - 1) + p * piece, piece);
            TRY(enter_round(g, round));
            for (uint64_t p = 0; p < n; p++)
                g->sources[p] =
                    p == me ? own_piece : bytes_of(g, (int)p, round - 1) + me * piece;
            void *slot = bytes_of(g, g->rank, round) + me * piece;
            reduce_and_copy(out + (c - 1) * chunk + me * piece, &slot, 1, g->sampler.streaming,
                          g->sources, (uint32_t)n,
                          chunk_bytes(chunk_bytes(bytes, c - 1, chunk), me, piece) /
                              dtype_bytes(g->running->dtype),
                          g->running->dtype, g->running->reduce);
            consume_round(g, round - 1);
        } else
            TRY(enter_round(g, round));
        for (uint64_t p = 0; p < n; p++)
            if (p != me)
                copy_to_peer(&g->sampler, bytes_of(g, g->rank, round) + p * piece,
                          in + c * chunk + p * piece, chunk_bytes(here, p, piece));
        post_round(g, round);
    }
    uint64_t last = first + chunks;
    TRY(await_all(g, last));
    for (uint64_t p = 0; p < n; p++)
        if (p != me)
            copy_result(g, out + (chunks - 1) * chunk + p * piece, bytes_of(g, (int)p, last) + p * piece,
                 chunk_bytes(chunk_bytes(bytes, chunks - 1, chunk), p, piece));
    consume_round(g, last);
    return 0;
}

static int all_reduce(tutti_group *g, const tutti_operation *op)
{
    uint64_t one_shot_bytes = min_u64(ONE_SHOT_BYTES / (uint64_t)(g->size - 1), g->slot_bytes);
    if (op->in_bytes[0] <= one_shot_bytes)
        return one_shot(g, op->in[0], op->out[0], op->in_bytes[0]);
    return two_shot(g, op->in[0], op->out[0], op->in_bytes[0]);
}

static int reduce(tutti_group *g, const tutti_operation *op)
{
    uint64_t bytes = op->in_bytes[0], chunk = flow_chunk(g, bytes);
    uint64_t rounds = rounds_for(bytes, chunk);
    const unsigned char *in = op->in[0];
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        uint64_t here = chunk_bytes(bytes, i, chunk);
        TRY(enter_round(g, round));
        if (g->rank != op->root)
            copy_to_peer(&g->sampler, bytes_of(g, g->rank, round), in + i * chunk, here);
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

/* ---- Running a collective ---- */

static int run_alone(const tutti_operation *op)
{
    if (op->in_parts && op->out_parts)
        reduce_parts(op->out[0], op->in, 1,
                     op->in_bytes[0] / dtype_bytes(op->dtype), op->dtype, op->reduce);
    return 0;
}

static int run_staged(tutti_group *g, const tutti_operation *op)
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

static int run_direct(tutti_group *g, const tutti_operation *op)
{
    switch (op->kind) {
    case TUTTI_ALL_REDUCE: return direct_all_reduce(g, op);
    case TUTTI_ALL_GATHER: return direct_all_gather(g, op);
    case TUTTI_REDUCE_SCATTER: return direct_reduce_scatter(g, op);
    default: return run_staged(g, op); /* a broadcast: only the root offers memory */
    }
}

/* If some ranks offer memory for direct access and others do not, every rank detects the difference
 * in the first round. All ranks then begin the operation again, with staging. */
static int dispatch(tutti_group *g, const tutti_operation *op)
{
    if (g->size == 1)
        return run_alone(op);
    uint64_t first = g->round + 1;
    int code = offer_memory(g, op) ? run_direct(g, op) : run_staged(g, op);
    if (code != PATHS_DIFFER)
        return code;
    consume_round(g, first);
    g->fingerprint &= ~DIRECT;
    return run_staged(g, op);
}

/* Returns whether to write results with non-temporal stores. An ordinary store to a line that is
 * in no cache first reads the line from memory. Non-temporal stores avoid this read, so they are
 * faster for results that are too large for the caches. They are not used for in-place results,
 * whose memory was just read, nor between close cores (copy.c). In both cases, non-temporal stores
 * were measured as slower, by up to a factor of two. */
static bool results_are_streamed(const tutti_group *g, const tutti_operation *op)
{
    bool in_place = op->in_parts == 1 && op->out_parts == 1 && op->in[0] == op->out[0];
    return g->sampler.streaming && !in_place && operation_bytes(op) >= STREAMED_BYTES;
}

int run_collective(tutti_group *g, const tutti_operation *op, uint64_t sequence, uint64_t entry,
                   double timeout, uint64_t deadline)
{
    g->running = op;
    g->running_sequence = sequence;
    g->running_timeout = timeout;
    g->running_deadline = deadline;
    g->fingerprint = hash_combine(g->fingerprint & ~DIRECT, operation_fingerprint(op)) & ~DIRECT;
    g->stream_results = results_are_streamed(g, op);
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
