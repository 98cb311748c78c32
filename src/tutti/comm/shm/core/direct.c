/* Collectives with direct access: ranks read and write each other's tensors, without staging slots.
 *
 * In the first round, every rank posts the id and offset of its tensor's memory (a block or an
 * export, exported.c). If all ranks have posted an id, each rank translates the ids and offsets to
 * addresses in its own mappings. The post (release) and the await (acquire) of that round order the
 * ranks' earlier writes to their tensors before the direct accesses. A second round, or a wait
 * until all peers have consumed the round, orders the direct accesses before any rank returns. */
#include "rounds.h"

#include <inttypes.h>

#ifndef DIRECT_BYTES
#define DIRECT_BYTES (4 * 1024) /* for fewer bytes, staging takes less time than a second wait */
#endif

/* Returns the contiguous memory of this rank that peers would access, or NULL if there is none. */
static const void *memory_to_offer(const tutti_group *g, const tutti_operation *op, uint64_t *bytes)
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
    const void *memory = memory_to_offer(g, op, &bytes);
    if (!memory || bytes < DIRECT_BYTES)
        return false;
    uint64_t id, offset;
    const block *block = block_of(g, memory, bytes);
    if (block) {
        id = block->id;
        offset = (uint64_t)((const unsigned char *)memory - block->bases[g->rank]);
    } else if (!find_exported(memory, bytes, &id, &offset))
        return false;
    if (enter_round(g, first) < 0)
        return false; /* the staged path fails in the same way and reports the error */
    _Atomic uint64_t *offer = g->peers[g->rank].control->offer[first % SLOTS];
    atomic_store_explicit(&offer[0], id, memory_order_relaxed);
    atomic_store_explicit(&offer[1], offset, memory_order_relaxed);
    g->fingerprint |= DIRECT;
    return true;
}

/* Finds the address at which this process has mapped the memory that a rank offered in a round. */
static int find_memory(tutti_group *g, int rank, uint64_t round, unsigned char **found)
{
    const _Atomic uint64_t *offer = g->peers[rank].control->offer[round % SLOTS];
    uint64_t id = atomic_load_explicit(&offer[0], memory_order_relaxed);
    uint64_t offset = atomic_load_explicit(&offer[1], memory_order_relaxed);
    if (id & EXPORTED) {
        TRY(map_exported(g, rank, id, found));
        *found += offset;
        return 0;
    }
    const block *block = block_by_id(g, id);
    if (!block)
        return fail(TUTTI_BAD_ARGUMENT,
                    "rank %d of group %s uses symmetric block %" PRIu64
                    ", but rank %d has not mapped it. Every rank must add the block.",
                    rank, g->name, id, g->rank);
    *found = block->bases[rank] + offset;
    return 0;
}

static int post_and_await(tutti_group *g, uint64_t round)
{
    TRY(enter_round(g, round));
    post_round(g, round);
    return await_all(g, round);
}

static int find_all_memory(tutti_group *g, uint64_t round)
{
    for (int rank = 0; rank < g->size; rank++) {
        unsigned char *memory = NULL;
        TRY(find_memory(g, rank, round, &memory));
        g->sources[rank] = memory;
    }
    return 0;
}

/* Waits until no peer reads this rank's memory any more. */
static int finish_reads(tutti_group *g, uint64_t round)
{
    consume_round(g, round);
    return await_consumed(g, round);
}

/* Each rank reduces one piece of all ranks' tensors and writes the result into all these
 * tensors. */
int direct_all_reduce(tutti_group *g, const tutti_operation *op)
{
    uint64_t n = (uint64_t)g->size, bytes = op->in_bytes[0], round = g->round + 1;
    uint64_t piece = ((bytes + n - 1) / n + LINE - 1) / LINE * LINE;
    uint64_t begin = min_u64(piece * (uint64_t)g->rank, bytes), end = min_u64(begin + piece, bytes);
    TRY(post_and_await(g, round));
    TRY(find_all_memory(g, round));
    uint32_t others = 0;
    for (int p = 0; p < g->size; p++) {
        unsigned char *piece_of = (unsigned char *)(uintptr_t)g->sources[p] + begin;
        g->sources[p] = piece_of;
        if (p != g->rank)
            g->copies[others++] = piece_of;
    }
    reduce_and_copy((unsigned char *)op->out[0] + begin, g->copies, others, false, g->sources,
                  (uint32_t)n, (end - begin) / dtype_bytes(op->dtype), op->dtype, op->reduce);
    consume_round(g, round);
    TRY(post_and_await(g, round + 1));
    consume_round(g, round + 1);
    return 0;
}

int direct_all_gather(tutti_group *g, const tutti_operation *op)
{
    uint64_t round = g->round + 1;
    TRY(post_and_await(g, round));
    TRY(find_all_memory(g, round));
    for (int step = 0; step < g->size; step++) {
        int rank = (g->rank + step) % g->size;
        copy_result(g, op->out[rank], g->sources[rank], op->out_bytes[rank]);
    }
    return finish_reads(g, round);
}

int direct_reduce_scatter(tutti_group *g, const tutti_operation *op)
{
    uint64_t round = g->round + 1, before = 0;
    TRY(post_and_await(g, round));
    TRY(find_all_memory(g, round));
    for (int rank = 0; rank < g->rank; rank++)
        before += op->in_bytes[rank];
    for (int rank = 0; rank < g->size; rank++)
        g->sources[rank] = (const unsigned char *)g->sources[rank] + before;
    if (op->out_bytes[0])
        reduce_parts(op->out[0], g->sources, (uint32_t)g->size,
                     op->out_bytes[0] / dtype_bytes(op->dtype), op->dtype, op->reduce);
    return finish_reads(g, round);
}

int direct_broadcast_root(tutti_group *g)
{
    uint64_t round = g->round + 1;
    post_round(g, round);
    return finish_reads(g, round);
}

/* Called in the first round, after the root has posted. */
int direct_broadcast_receiver(tutti_group *g, const tutti_operation *op)
{
    uint64_t round = g->round + 1;
    unsigned char *memory = NULL;
    TRY(find_memory(g, op->root, round, &memory));
    copy_result(g, op->out[0], memory, op->out_bytes[0]);
    consume_round(g, round);
    return 0;
}
