/* Collectives on symmetric memory: peers read and write each other's tensors, nothing is staged.
 *
 * In the first round every rank posts where its tensor lies; when all have one, each finds the
 * others' at its own mapping of their blocks. The posting (release) and awaiting (acquire) of that
 * round order what the ranks wrote into their tensors before; a last round, or the consumed mark,
 * orders what was read and written here before anyone returns. */
#include "chunks.h"

#include <inttypes.h>

#ifndef SYMMETRIC_BYTES
#define SYMMETRIC_BYTES (4 * 1024) /* below, staging costs less than waiting twice */
#endif

/* The memory of this rank that others may read, when the operation has such: all of it in one piece
 * that lies in one block. */
static const void *shared_memory(const tutti_group *g, const tutti_operation *op, uint64_t *bytes)
{
    *bytes = op->in_parts ? op->in_bytes[0] : 0;
    switch (op->kind) {
    case TUTTI_ALL_REDUCE: return op->in[0] == op->out[0] ? op->in[0] : NULL;
    case TUTTI_ALL_GATHER: return op->in[0];
    case TUTTI_BROADCAST: return g->rank == op->root ? op->in[0] : NULL;
    case TUTTI_REDUCE_SCATTER:
        for (uint32_t i = 1; i < op->in_parts; i++) {
            if ((const unsigned char *)op->in[0] + *bytes != op->in[i])
                return NULL;
            *bytes += op->in_bytes[i];
        }
        return op->in[0];
    default: return NULL;
    }
}

bool offer_memory(tutti_group *g, const tutti_operation *op)
{
    uint64_t bytes, first = g->round + 1;
    const void *memory = shared_memory(g, op, &bytes);
    if (!memory || bytes < SYMMETRIC_BYTES)
        return false;
    uint64_t id, offset;
    const block *block = block_of(g, memory, bytes);
    if (block) {
        id = block->id;
        offset = (uint64_t)((const unsigned char *)memory - block->bases[g->rank]);
    } else if (!lent_place(memory, bytes, &id, &offset))
        return false;
    if (enter_round(g, first) < 0)
        return false; /* the staged form meets the same trouble, and reports it */
    _Atomic uint64_t *place = g->peers[g->rank].control->place[first % SLOTS];
    atomic_store_explicit(&place[0], id, memory_order_relaxed);
    atomic_store_explicit(&place[1], offset, memory_order_relaxed);
    g->print |= SYMMETRIC;
    return true;
}

/* Where this process sees the memory that a rank offered in a round. */
static int find_memory(tutti_group *g, int rank, uint64_t round, unsigned char **found)
{
    const _Atomic uint64_t *place = g->peers[rank].control->place[round % SLOTS];
    uint64_t id = atomic_load_explicit(&place[0], memory_order_relaxed);
    uint64_t offset = atomic_load_explicit(&place[1], memory_order_relaxed);
    if (id & LENT) {
        TRY(borrow(g, rank, id, found));
        *found += offset;
        return 0;
    }
    const block *block = block_by_id(g, id);
    if (!block)
        return fail(TUTTI_BAD_ARGUMENT,
                    "rank %d of group %s uses symmetric block %" PRIu64
                    ", which rank %d has not mapped: every rank must add it",
                    rank, g->name, id, g->rank);
    *found = block->bases[rank] + offset;
    return 0;
}

static int meet(tutti_group *g, uint64_t round)
{
    TRY(enter_round(g, round));
    post_round(g, round);
    return await_all(g, round);
}

static int find_all(tutti_group *g, uint64_t round)
{
    for (int rank = 0; rank < g->size; rank++) {
        unsigned char *memory = NULL;
        TRY(find_memory(g, rank, round, &memory));
        g->sources[rank] = memory;
    }
    return 0;
}

/* Waits until nobody reads this rank's memory any more. */
static int part(tutti_group *g, uint64_t round)
{
    consume_round(g, round);
    return await_consumed(g, round);
}

/* Each rank reduces its piece of all tensors, and writes the result into all of them. */
int direct_all_reduce(tutti_group *g, const tutti_operation *op)
{
    uint64_t n = (uint64_t)g->size, bytes = op->in_bytes[0], round = g->round + 1;
    uint64_t piece = ((bytes + n - 1) / n + LINE - 1) / LINE * LINE;
    uint64_t begin = least(piece * (uint64_t)g->rank, bytes), end = least(begin + piece, bytes);
    TRY(meet(g, round));
    TRY(find_all(g, round));
    uint32_t others = 0;
    for (int p = 0; p < g->size; p++) {
        unsigned char *piece_of = (unsigned char *)(uintptr_t)g->sources[p] + begin;
        g->sources[p] = piece_of;
        if (p != g->rank)
            g->places[others++] = piece_of;
    }
    reduce_to_all((unsigned char *)op->out[0] + begin, g->places, others, false, g->sources,
                  (uint32_t)n, (end - begin) / dtype_bytes(op->dtype), op->dtype, op->reduce);
    consume_round(g, round);
    TRY(meet(g, round + 1));
    consume_round(g, round + 1);
    return 0;
}

int direct_all_gather(tutti_group *g, const tutti_operation *op)
{
    uint64_t round = g->round + 1;
    TRY(meet(g, round));
    TRY(find_all(g, round));
    for (int step = 0; step < g->size; step++) {
        int rank = (g->rank + step) % g->size;
        take(g, op->out[rank], g->sources[rank], op->out_bytes[rank]);
    }
    return part(g, round);
}

int direct_reduce_scatter(tutti_group *g, const tutti_operation *op)
{
    uint64_t round = g->round + 1, before = 0;
    TRY(meet(g, round));
    TRY(find_all(g, round));
    for (int rank = 0; rank < g->rank; rank++)
        before += op->in_bytes[rank];
    for (int rank = 0; rank < g->size; rank++)
        g->sources[rank] = (const unsigned char *)g->sources[rank] + before;
    if (op->out_bytes[0])
        reduce_parts(op->out[0], g->sources, (uint32_t)g->size,
                     op->out_bytes[0] / dtype_bytes(op->dtype), op->dtype, op->reduce);
    return part(g, round);
}

int direct_broadcast_root(tutti_group *g)
{
    uint64_t round = g->round + 1;
    post_round(g, round);
    return part(g, round);
}

/* Called in the first round, when the root's posting has been seen. */
int direct_broadcast_rest(tutti_group *g, const tutti_operation *op)
{
    uint64_t round = g->round + 1;
    unsigned char *memory = NULL;
    TRY(find_memory(g, op->root, round, &memory));
    take(g, op->out[0], memory, op->out_bytes[0]);
    consume_round(g, round);
    return 0;
}
