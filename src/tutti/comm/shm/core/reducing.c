/* The collectives that reduce, each a sequence of rounds (rounds.h).
 *
 * Ranks are taken in the order 0..n-1 whatever the path, so one-shot, two-shot and symmetric forms
 * give the same bits, and give them to every rank. */
#include "chunks.h"

#ifndef ONE_SHOT_BYTES
#define ONE_SHOT_BYTES (128 * 1024) /* read from peers; above, a second round costs less */
#endif

/* Everyone stages everything and reduces everything: one round. */
static int one_shot(tutti_group *g, const void *in, void *out, uint64_t bytes)
{
    const tutti_operation *op = g->running;
    uint64_t round = g->round + 1;
    TRY(enter_round(g, round));
    hand_over(&g->crossing, bytes_of(g, g->rank, round), in, bytes);
    post_round(g, round);
    TRY(await_all(g, round));
    for (int rank = 0; rank < g->size; rank++)
        g->sources[rank] = rank == g->rank ? in : bytes_of(g, rank, round);
    reduce_parts(out, g->sources, (uint32_t)g->size, bytes / dtype_bytes(op->dtype), op->dtype,
                 op->reduce);
    consume_round(g, round);
    return 0;
}

/* Chunk by chunk, each rank reduces its piece and hands it to the others. A round carries the
 * results of one chunk and the inputs of the next, so there is one wait per chunk. A slot has a
 * place per piece; nobody needs this rank's own piece of the input, so its result lies there. */
static int two_shot(tutti_group *g, const unsigned char *in, unsigned char *out, uint64_t bytes)
{
    uint64_t n = (uint64_t)g->size, me = (uint64_t)g->rank;
    uint64_t most = g->slot_bytes / n / LINE * LINE * n, even = rounds_for(bytes, most);
    uint64_t piece = ((bytes + even - 1) / even + n - 1) / n;
    piece = (piece + LINE - 1) / LINE * LINE; /* so that all chunks and pieces are about alike */
    uint64_t chunk = piece * n, chunks = rounds_for(bytes, chunk), first = g->round + 1;
    for (uint64_t c = 0; c <= chunks; c++) {
        uint64_t round = first + c, here = chunk_bytes(bytes, c, chunk);
        if (c) {
            const unsigned char *mine = in + (c - 1) * chunk + me * piece;
            TRY(await_all(g, round - 1));
            for (uint64_t p = 0; p < n && c > 1; p++)
                if (p != me)
                    take(g, out + (c - 2) * chunk + p * piece,
                         bytes_of(g, (int)p, round - 1) + p * piece, piece);
            TRY(enter_round(g, round));
            for (uint64_t p = 0; p < n; p++)
                g->sources[p] =
                    p == me ? mine : bytes_of(g, (int)p, round - 1) + me * piece;
            void *slot = bytes_of(g, g->rank, round) + me * piece;
            reduce_to_all(out + (c - 1) * chunk + me * piece, &slot, 1, g->crossing.dear,
                          g->sources, (uint32_t)n,
                          chunk_bytes(chunk_bytes(bytes, c - 1, chunk), me, piece) /
                              dtype_bytes(g->running->dtype),
                          g->running->dtype, g->running->reduce);
            consume_round(g, round - 1);
        } else
            TRY(enter_round(g, round));
        for (uint64_t p = 0; p < n; p++)
            if (p != me)
                hand_over(&g->crossing, bytes_of(g, g->rank, round) + p * piece,
                          in + c * chunk + p * piece, chunk_bytes(here, p, piece));
        post_round(g, round);
    }
    uint64_t last = first + chunks;
    TRY(await_all(g, last));
    for (uint64_t p = 0; p < n; p++)
        if (p != me)
            take(g, out + (chunks - 1) * chunk + p * piece, bytes_of(g, (int)p, last) + p * piece,
                 chunk_bytes(chunk_bytes(bytes, chunks - 1, chunk), p, piece));
    consume_round(g, last);
    return 0;
}

int all_reduce(tutti_group *g, const tutti_operation *op)
{
    uint64_t one_shot_bytes = least(ONE_SHOT_BYTES / (uint64_t)(g->size - 1), g->slot_bytes);
    if (op->in_bytes[0] <= one_shot_bytes)
        return one_shot(g, op->in[0], op->out[0], op->in_bytes[0]);
    return two_shot(g, op->in[0], op->out[0], op->in_bytes[0]);
}

int reduce(tutti_group *g, const tutti_operation *op)
{
    uint64_t bytes = op->in_bytes[0], chunk = flow_chunk(g, bytes);
    uint64_t rounds = rounds_for(bytes, chunk);
    const unsigned char *in = op->in[0];
    for (uint64_t i = 0, round = g->round + 1; i < rounds; i++, round++) {
        uint64_t here = chunk_bytes(bytes, i, chunk);
        TRY(enter_round(g, round));
        if (g->rank != op->root)
            hand_over(&g->crossing, bytes_of(g, g->rank, round), in + i * chunk, here);
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

int reduce_scatter(tutti_group *g, const tutti_operation *op)
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
