/* Blocks of symmetric memory that a group's collectives may use without staging. */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>

static block *find_block(const tutti_group *g, uint64_t id)
{
    block *found = atomic_load(&g->blocks);
    while (found && found->id != id)
        found = found->next;
    return found;
}

TUTTI_API int tutti_group_add_block(tutti_group *g, uint64_t id, void *const *bases, uint64_t bytes)
{
    block *added = malloc(sizeof *added + (size_t)g->size * sizeof *added->bases);
    if (!added)
        return fail(TUTTI_NO_MEMORY, "no memory for a block's entry");
    added->id = id;
    added->bytes = bytes;
    for (int rank = 0; rank < g->size; rank++)
        added->bases[rank] = bases[rank];
    pthread_mutex_lock(&g->blocks_lock);
    bool known = find_block(g, id) != NULL;
    if (!known) {
        added->next = atomic_load(&g->blocks);
        atomic_store(&g->blocks, added);
    }
    pthread_mutex_unlock(&g->blocks_lock);
    if (!known)
        return 0;
    free(added);
    return fail(TUTTI_BAD_ARGUMENT, "group %s has a block %" PRIu64 " already", g->name, id);
}

TUTTI_API int tutti_group_remove_block(tutti_group *g, uint64_t id)
{
    pthread_mutex_lock(&g->blocks_lock);
    block *removed = find_block(g, id), *before = atomic_load(&g->blocks);
    if (removed && removed == before)
        atomic_store(&g->blocks, removed->next);
    else if (removed) {
        while (before->next != removed)
            before = before->next;
        before->next = removed->next;
    }
    pthread_mutex_unlock(&g->blocks_lock);
    if (!removed)
        return fail(TUTTI_BAD_ARGUMENT, "group %s has no block %" PRIu64, g->name, id);
    free(removed);
    return 0;
}

const block *block_of(tutti_group *g, const void *address, uint64_t bytes)
{
    if (!atomic_load_explicit(&g->blocks, memory_order_relaxed))
        return NULL;
    const unsigned char *start = address;
    pthread_mutex_lock(&g->blocks_lock);
    block *b = atomic_load(&g->blocks);
    while (b && !(start >= b->bases[g->rank] && start + bytes <= b->bases[g->rank] + b->bytes))
        b = b->next;
    pthread_mutex_unlock(&g->blocks_lock);
    return b;
}

const block *block_by_id(tutti_group *g, uint64_t id)
{
    pthread_mutex_lock(&g->blocks_lock);
    block *b = find_block(g, id);
    pthread_mutex_unlock(&g->blocks_lock);
    return b;
}

void free_blocks(tutti_group *g)
{
    block *next = atomic_load(&g->blocks);
    while (next) {
        block *freed = next;
        next = next->next;
        free(freed);
    }
}
