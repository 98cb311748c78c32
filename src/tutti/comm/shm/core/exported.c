/* Memory that collectives use in place, without staging copies: registered blocks and exported
 * memory.
 *
 * A block is symmetric memory that all ranks of a group have agreed on and mapped beforehand
 * (tutti_group_add_block). A process allocates exported memory without its peers, so an allocator
 * that has no access to the group can use it, such as the allocator of DDP's buckets. Peers map the
 * memory when an operation first uses it. The id that a rank posts in an operation's first round
 * contains the file descriptor that peers open in that rank's process. The rank that posts an id
 * stays inside the operation until all peers have finished with the memory, so the memory cannot be
 * freed before that. */
#define _GNU_SOURCE /* fallocate */
#include "internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- Blocks ---- */

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
        return fail(TUTTI_NO_MEMORY, "there is no memory to register a block");
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
    return fail(TUTTI_BAD_ARGUMENT, "group %s already has a block %" PRIu64, g->name, id);
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

/* ---- Exported memory ---- */

typedef struct exported {
    uint64_t id, bytes;
    unsigned char *memory; /* follows the segment's first cache line, which holds the id */
    tutti_segment *segment;
    pid_t owner;
    struct exported *next;
} exported;

struct mapping {
    int rank;
    uint64_t id;
    tutti_segment *segment;
    struct mapping *next;
};

static pthread_mutex_t export_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(exported *) all_exports;
static uint64_t exports_so_far;

void reset_export_lock(void)
{
    pthread_mutex_init(&export_lock, NULL);
}

static _Atomic uint64_t *id_in(const tutti_segment *segment)
{
    return tutti_segment_base(segment);
}

TUTTI_API void *tutti_export_alloc(uint64_t bytes)
{
    exported *made = malloc(sizeof *made);
    tutti_segment *segment = NULL;
    if (!made)
        fail(TUTTI_NO_MEMORY, "there is no memory for %zu bytes", sizeof *made);
    else if (bytes == 0 || bytes > INT64_MAX - LINE)
        fail(TUTTI_BAD_ARGUMENT, "%" PRIu64 " bytes cannot be exported", bytes);
    else
        segment = tutti_segment_create("exported memory", LINE + bytes);
    if (!segment) {
        free(made);
        return NULL;
    }
    uint64_t fd = (uint64_t)tutti_segment_fd(segment);
    unsigned char *memory = (unsigned char *)tutti_segment_base(segment) + LINE;
    pthread_mutex_lock(&export_lock);
    /* The counter distinguishes two exports that used the same descriptor one after the other. */
    uint64_t id = EXPORTED | (++exports_so_far & 0x7fffffff) << 32 | fd;
    *made = (exported){id, bytes, memory, segment, getpid(), atomic_load(&all_exports)};
    atomic_store(id_in(segment), id);
    atomic_store(&all_exports, made);
    pthread_mutex_unlock(&export_lock);
    return memory;
}

TUTTI_API void tutti_export_free(void *memory)
{
    pthread_mutex_lock(&export_lock);
    exported *found = atomic_load(&all_exports), *before = NULL;
    while (found && found->memory != memory) {
        before = found;
        found = found->next;
    }
    if (found && before)
        before->next = found->next;
    else if (found)
        atomic_store(&all_exports, found->next);
    pthread_mutex_unlock(&export_lock);
    if (!found)
        return;
    if (found->owner == getpid()) { /* in a forked child the parent still uses the memory */
        /* Peers unmap the segment when they next map an export of this rank, or when they close the
         * group. Punching a hole frees the pages at once. Freed pages read as zeros, and an id of 0
         * shows peers that the export was freed. */
        off_t whole = (off_t)tutti_segment_bytes(found->segment);
        atomic_store(id_in(found->segment), 0);
        fallocate(tutti_segment_fd(found->segment), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  whole);
    }
    tutti_segment_close(found->segment);
    free(found);
}

static bool find_export(const unsigned char *start, uint64_t bytes, uint64_t id, exported *copy)
{
    if (!atomic_load_explicit(&all_exports, memory_order_relaxed))
        return false;
    pthread_mutex_lock(&export_lock);
    const exported *found = atomic_load(&all_exports);
    while (found && (id ? found->id != id
                        : start < found->memory || start + bytes > found->memory + found->bytes))
        found = found->next;
    if (found)
        *copy = *found;
    pthread_mutex_unlock(&export_lock);
    return found;
}

bool find_exported(const void *address, uint64_t bytes, uint64_t *id, uint64_t *offset)
{
    exported found;
    if (!find_export(address, bytes, 0, &found) || found.owner != getpid())
        return false;
    *id = found.id;
    *offset = (uint64_t)((const unsigned char *)address - found.memory);
    return true;
}

static void unmap_freed(tutti_group *g, int rank)
{
    for (mapping **link = &g->mappings; *link;) {
        mapping *each = *link;
        if (each->rank != rank || atomic_load(id_in(each->segment)) == each->id) {
            link = &each->next;
            continue;
        }
        *link = each->next;
        tutti_segment_close(each->segment);
        free(each);
    }
}

int map_exported(tutti_group *g, int rank, uint64_t id, unsigned char **memory)
{
    exported own;
    if (rank == g->rank) {
        if (!find_export(NULL, 0, id, &own))
            return fail(TUTTI_BAD_ARGUMENT,
                        "exported memory was freed while an operation was using it");
        *memory = own.memory;
        return 0;
    }
    mapping *found = g->mappings;
    while (found && (found->rank != rank || found->id != id))
        found = found->next;
    if (!found) {
        unmap_freed(g, rank);
        found = malloc(sizeof *found);
        if (!found)
            return fail(TUTTI_NO_MEMORY, "there is no memory for %zu bytes", sizeof *found);
        int64_t pid = g->peers[rank].header->pid;
        tutti_segment *segment = tutti_segment_open(pid, (int)(id & 0x7fffffff), 0);
        if (!segment || atomic_load(id_in(segment)) != id) {
            int code = segment ? fail(TUTTI_SYSTEM, "rank %d of group %s freed exported memory "
                                      "while an operation was using it", rank, g->name)
                               : tutti_error_code();
            tutti_segment_close(segment);
            free(found);
            return code;
        }
        segment_close_descriptor(segment);
        *found = (mapping){rank, id, segment, g->mappings};
        g->mappings = found;
    }
    *memory = (unsigned char *)tutti_segment_base(found->segment) + LINE;
    return 0;
}

void free_mappings(tutti_group *g)
{
    while (g->mappings) {
        mapping *freed = g->mappings;
        g->mappings = freed->next;
        tutti_segment_close(freed->segment);
        free(freed);
    }
}
