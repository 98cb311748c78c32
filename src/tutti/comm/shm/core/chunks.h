/* How parts are cut into chunks, and where these lie in a slot. */
#ifndef TUTTI_CHUNKS_H
#define TUTTI_CHUNKS_H

#include "rounds.h"

static inline uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline void copy(void *to, const void *from, uint64_t bytes)
{
    if (bytes && to != from)
        copy_bytes(to, from, bytes);
}

/* Copies bytes to where the caller wants them. */
static inline void take(const tutti_group *g, void *to, const void *from, uint64_t bytes)
{
    if (g->past_caches && bytes && to != from) {
        stream_bytes(to, from, bytes);
        streams_end();
    } else
        copy(to, from, bytes);
}

static inline uint64_t rounds_for(uint64_t bytes, uint64_t chunk)
{
    return bytes <= chunk ? 1 : (bytes + chunk - 1) / chunk;
}

/* Chunks for bytes that flow one way: several, so that both sides copy at the same time, but not
 * more than there are slots if that can be, so that the giver need not wait. */
static inline uint64_t flow_chunk(const tutti_group *g, uint64_t bytes)
{
    uint64_t least_chunk = 64 * 1024, chunk = (bytes / SLOTS + LINE - 1) / LINE * LINE;
    return least(chunk < least_chunk ? least_chunk : chunk, g->slot_bytes);
}

/* Of a part cut into chunks: the bytes of chunk i. */
static inline uint64_t chunk_bytes(uint64_t part, uint64_t i, uint64_t chunk)
{
    return part > i * chunk ? least(part - i * chunk, chunk) : 0;
}

/* A slot begins with a table of numbers: for operations whose sizes no single rank knows. */
static inline uint64_t *table_of(const tutti_group *g, int rank, uint64_t round)
{
    return (uint64_t *)slot_of(g, rank, round);
}

static inline unsigned char *bytes_of(const tutti_group *g, int rank, uint64_t round)
{
    return slot_of(g, rank, round) + g->table_bytes;
}

static inline uint64_t lane_bytes(const tutti_group *g)
{
    return g->slot_bytes / (uint64_t)(g->size - 1) / LINE * LINE;
}

static inline uint64_t largest(const uint64_t *bytes, uint32_t n)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < n; i++)
        most = bytes[i] > most ? bytes[i] : most;
    return most;
}

/* Stages what each of the others gets of chunk i. */
static inline void stage_lanes(tutti_group *g, const tutti_operation *op, uint64_t i,
                               uint64_t round)
{
    uint64_t share = lane_bytes(g);
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank)
            hand_over(&g->crossing, bytes_of(g, g->rank, round) + lane(g->rank, rank) * share,
                      (const unsigned char *)op->in[rank] + i * share,
                      chunk_bytes(op->in_bytes[rank], i, share));
}

/* ---- reducing.c ---- */
int all_reduce(tutti_group *, const tutti_operation *);
int reduce(tutti_group *, const tutti_operation *);
int reduce_scatter(tutti_group *, const tutti_operation *);

/* ---- symmetric.c: these return OTHERWISE when not all ranks have symmetric memory ---- */
bool offer_memory(tutti_group *, const tutti_operation *);
int direct_all_reduce(tutti_group *, const tutti_operation *);
int direct_all_gather(tutti_group *, const tutti_operation *);
int direct_reduce_scatter(tutti_group *, const tutti_operation *);
int direct_broadcast_root(tutti_group *);
int direct_broadcast_rest(tutti_group *, const tutti_operation *);

#endif
