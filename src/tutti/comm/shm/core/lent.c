/* Lent memory: a process makes it by itself, and peers map it when an operation first shows it.
 *
 * Blocks (blocks.c) are agreed on by all ranks beforehand. Lent memory needs no agreement, so it
 * suits whoever allocates without knowing the group: DDP's buckets. The id that a rank posts in an
 * operation's first round says which descriptor of its process to open. Whoever posts it is inside
 * the operation until all others have left the memory, so it cannot go away meanwhile. */
#define _GNU_SOURCE /* fallocate */
#include "internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct lent {
    uint64_t id, bytes;
    unsigned char *memory; /* a line behind the segment's start, where the id stands */
    tutti_segment *segment;
    pid_t owner;
    struct lent *next;
} lent;

struct borrowed {
    int rank;
    uint64_t id;
    tutti_segment *segment;
    struct borrowed *next;
};

static pthread_mutex_t lent_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(lent *) all_lent;
static uint64_t lent_so_far;

void forget_lent_lock(void)
{
    pthread_mutex_init(&lent_lock, NULL);
}

static _Atomic uint64_t *id_in(const tutti_segment *segment)
{
    return tutti_segment_base(segment);
}

TUTTI_API void *tutti_lend(uint64_t bytes)
{
    lent *made = malloc(sizeof *made);
    tutti_segment *segment = NULL;
    if (!made)
        fail(TUTTI_NO_MEMORY, "no memory for %zu bytes", sizeof *made);
    else if (bytes == 0 || bytes > INT64_MAX - LINE)
        fail(TUTTI_BAD_ARGUMENT, "%" PRIu64 " bytes cannot be lent", bytes);
    else
        segment = tutti_segment_create("lent memory", LINE + bytes);
    if (!segment) {
        free(made);
        return NULL;
    }
    uint64_t fd = (uint64_t)tutti_segment_fd(segment);
    unsigned char *memory = (unsigned char *)tutti_segment_base(segment) + LINE;
    pthread_mutex_lock(&lent_lock);
    /* The number tells apart what had the same descriptor, one after the other. */
    uint64_t id = LENT | (++lent_so_far & 0x7fffffff) << 32 | fd;
    *made = (lent){id, bytes, memory, segment, getpid(), atomic_load(&all_lent)};
    atomic_store(id_in(segment), id);
    atomic_store(&all_lent, made);
    pthread_mutex_unlock(&lent_lock);
    return memory;
}

TUTTI_API void tutti_take_back(void *memory)
{
    pthread_mutex_lock(&lent_lock);
    lent *found = atomic_load(&all_lent), *before = NULL;
    while (found && found->memory != memory) {
        before = found;
        found = found->next;
    }
    if (found && before)
        before->next = found->next;
    else if (found)
        atomic_store(&all_lent, found->next);
    pthread_mutex_unlock(&lent_lock);
    if (!found)
        return;
    if (found->owner == getpid()) { /* not in a forked child, whose parent goes on using it */
        /* Peers unmap it when they next map something, or when they close the group. The memory
         * itself is free now, and reads as zeros: also the id, which tells them. */
        off_t whole = (off_t)tutti_segment_bytes(found->segment);
        atomic_store(id_in(found->segment), 0);
        fallocate(tutti_segment_fd(found->segment), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  whole);
    }
    tutti_segment_close(found->segment);
    free(found);
}

static bool find_lent(const unsigned char *start, uint64_t bytes, uint64_t id, lent *copy)
{
    if (!atomic_load_explicit(&all_lent, memory_order_relaxed))
        return false;
    pthread_mutex_lock(&lent_lock);
    const lent *found = atomic_load(&all_lent);
    while (found && (id ? found->id != id
                        : start < found->memory || start + bytes > found->memory + found->bytes))
        found = found->next;
    if (found)
        *copy = *found;
    pthread_mutex_unlock(&lent_lock);
    return found;
}

bool lent_place(const void *address, uint64_t bytes, uint64_t *id, uint64_t *offset)
{
    lent found;
    if (!find_lent(address, bytes, 0, &found) || found.owner != getpid())
        return false;
    *id = found.id;
    *offset = (uint64_t)((const unsigned char *)address - found.memory);
    return true;
}

static void unmap_taken_back(tutti_group *g, int rank)
{
    for (borrowed **link = &g->borrowed; *link;) {
        borrowed *each = *link;
        if (each->rank != rank || atomic_load(id_in(each->segment)) == each->id) {
            link = &each->next;
            continue;
        }
        *link = each->next;
        tutti_segment_close(each->segment);
        free(each);
    }
}

int borrow(tutti_group *g, int rank, uint64_t id, unsigned char **memory)
{
    lent own;
    if (rank == g->rank) {
        if (!find_lent(NULL, 0, id, &own))
            return fail(TUTTI_BAD_ARGUMENT, "memory was taken back while an operation uses it");
        *memory = own.memory;
        return 0;
    }
    borrowed *found = g->borrowed;
    while (found && (found->rank != rank || found->id != id))
        found = found->next;
    if (!found) {
        unmap_taken_back(g, rank);
        found = malloc(sizeof *found);
        if (!found)
            return fail(TUTTI_NO_MEMORY, "no memory for %zu bytes", sizeof *found);
        int64_t pid = g->peers[rank].header->pid;
        tutti_segment *segment = tutti_segment_open(pid, (int)(id & 0x7fffffff), 0);
        if (!segment || atomic_load(id_in(segment)) != id) {
            int code = segment ? fail(TUTTI_SYSTEM, "rank %d of group %s took memory back while "
                                      "an operation uses it", rank, g->name)
                               : tutti_error_code();
            tutti_segment_close(segment);
            free(found);
            return code;
        }
        segment_is_mapped(segment);
        *found = (borrowed){rank, id, segment, g->borrowed};
        g->borrowed = found;
    }
    *memory = (unsigned char *)tutti_segment_base(found->segment) + LINE;
    return 0;
}

void free_borrowed(tutti_group *g)
{
    while (g->borrowed) {
        borrowed *freed = g->borrowed;
        g->borrowed = freed->next;
        tutti_segment_close(freed->segment);
        free(freed);
    }
}
