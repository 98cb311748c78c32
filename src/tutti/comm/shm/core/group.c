/* Groups: creation, layout of a rank's segment, connecting to peers, abort and close. */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_STAGING (SLOTS * 256 * 1024)
#define SMALLEST_SLOT 4096
#define ALL_RINGS (256 * 1024) /* bytes of all rings of a rank together */
#define SMALLEST_RING 4096

static pthread_mutex_t groups_lock = PTHREAD_MUTEX_INITIALIZER;
static tutti_group *groups;
static atomic_uint fork_generation;

static void after_fork_in_child(void)
{
    atomic_fetch_add(&fork_generation, 1); /* the parent's groups are not usable here */
    pthread_mutex_init(&groups_lock, NULL);
    reset_segment_lock();
    reset_export_lock();
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

static uint64_t round_up(uint64_t value, uint64_t to)
{
    return (value + to - 1) / to * to;
}

/* Offsets of the parts of a segment. They depend only on (size, staging), which are equal on all
 * ranks. */
typedef struct {
    uint64_t control, ledger, location, sent, received, rings, slots, bytes;
    uint64_t ring_bytes, slot_bytes, slot_stride, table_bytes;
} layout;

static layout compute_layout(int size, uint64_t staging)
{
    layout l;
    uint64_t n = (uint64_t)size;
    l.slot_bytes = staging / SLOTS / 4096 * 4096;
    if (l.slot_bytes < SMALLEST_SLOT)
        l.slot_bytes = SMALLEST_SLOT;
    if (l.slot_bytes < n * 2 * LINE) /* each peer's share of a slot is at least two cache lines */
        l.slot_bytes = round_up(n * 2 * LINE, 4096);
    l.table_bytes = round_up(8 * (n + 1), LINE);
    l.slot_stride = round_up(l.slot_bytes + l.table_bytes, 4096);
    l.ring_bytes = SMALLEST_RING;
    while (l.ring_bytes * 2 * (n > 1 ? n - 1 : 1) <= ALL_RINGS)
        l.ring_bytes *= 2;
    l.control = round_up(sizeof(tutti_header), 4096);
    l.ledger = round_up(l.control + sizeof(control), 4096);
    l.location = l.ledger + TUTTI_LEDGER_ENTRIES * sizeof(tutti_entry);
    l.sent = round_up(l.location + sizeof(tutti_location), 4096);
    l.received = l.sent + n * sizeof(ring_mark);
    l.rings = round_up(l.received + n * sizeof(ring_mark), 4096);
    l.slots = round_up(l.rings + (n - 1) * l.ring_bytes, 4096);
    l.bytes = l.slots + SLOTS * l.slot_stride;
    return l;
}

static void locate_parts(peer *peer, tutti_segment *segment, const layout *l)
{
    unsigned char *base = tutti_segment_base(segment);
    peer->segment = segment;
    peer->header = (tutti_header *)base;
    peer->control = (control *)(base + l->control);
    peer->ledger = (tutti_entry *)(base + l->ledger);
    peer->location = (tutti_location *)(base + l->location);
    peer->sent = (ring_mark *)(base + l->sent);
    peer->received = (ring_mark *)(base + l->received);
    peer->rings = base + l->rings;
    peer->slots = base + l->slots;
}

static void write_header(tutti_group *g, const layout *l, uint64_t bytes)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    uint64_t realtime = (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
    g->realtime_offset = realtime - now_ns();
    tutti_header *header = g->peers[g->rank].header;
    memcpy(header->magic, "TUTTISHM", 8);
    header->abi = TUTTI_ABI;
    header->entries = TUTTI_LEDGER_ENTRIES;
    header->rank = g->rank;
    header->size = g->size;
    header->pid = getpid();
    header->token = g->token;
    header->bytes = bytes;
    header->ledger_offset = l->ledger;
    header->entry_bytes = sizeof(tutti_entry);
    header->location_offset = l->location;
    header->created_ns = (int64_t)realtime;
    memcpy(header->name, g->name, sizeof header->name);
}

TUTTI_API tutti_group *tutti_group_create(const char *name, int rank, int size,
                                          uint64_t staging_bytes, uint64_t token)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (size < 1 || size > TUTTI_MAX_RANKS || rank < 0 || rank >= size) {
        fail(TUTTI_BAD_ARGUMENT,
             "rank %d of %d is not possible: a group has 1 to %d ranks, numbered from 0", rank, size,
             TUTTI_MAX_RANKS);
        return NULL;
    }
    layout l = compute_layout(size, staging_bytes ? staging_bytes : DEFAULT_STAGING);
    tutti_group *g = calloc(1, sizeof *g);
    if (g) {
        g->peers = calloc((size_t)size, sizeof *g->peers);
        g->sources = calloc((size_t)size, sizeof *g->sources);
        g->copies = calloc((size_t)size, sizeof *g->copies);
    }
    if (!g || !g->peers || !g->sources || !g->copies) {
        fail(TUTTI_NO_MEMORY, "there is no memory for a group of %d ranks", size);
        goto failed;
    }
    snprintf(g->name, sizeof g->name, "%s", name ? name : "");
    g->rank = rank;
    g->size = size;
    g->token = token;
    g->slot_bytes = l.slot_bytes;
    g->slot_stride = l.slot_stride;
    g->table_bytes = l.table_bytes;
    g->ring_bytes = l.ring_bytes;
    g->limits = g->limits_now = spin_limits_for(size);
    g->fork_generation = atomic_load(&fork_generation);
    tutti_segment *segment = tutti_segment_create(g->name, l.bytes);
    if (!segment)
        goto failed;
    locate_parts(&g->peers[rank], segment, &l);
    write_header(g, &l, l.bytes);
    g->connected = 1;
    pthread_mutex_init(&g->broken_lock, NULL);
    pthread_mutex_init(&g->blocks_lock, NULL);
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&g->work_queued, &attributes);
    pthread_cond_init(&g->collective_over, &attributes);
    pthread_condattr_destroy(&attributes);
    if (p2p_create(g) < 0) {
        tutti_segment_close(segment);
        goto failed;
    }
    pthread_mutex_lock(&groups_lock);
    g->next = groups;
    groups = g;
    pthread_mutex_unlock(&groups_lock);
    return g;
failed:
    if (g) {
        free(g->peers);
        free(g->sources);
        free(g->copies);
    }
    free(g);
    return NULL;
}

TUTTI_API int tutti_group_fd(const tutti_group *g)
{
    return tutti_segment_fd(g->peers[g->rank].segment);
}

TUTTI_API uint64_t tutti_group_bytes(const tutti_group *g)
{
    return tutti_segment_bytes(g->peers[g->rank].segment);
}

/* Called when all ranks are connected, because the number of spins of a waiter depends on the CPUs
 * that the ranks may use. */
static void set_spin_limits(tutti_group *g)
{
    int64_t pids[TUTTI_MAX_RANKS];
    for (int rank = 0; rank < g->size; rank++)
        pids[rank] = g->peers[rank].header->pid;
    count_cpus_of(pids, g->size);
    g->limits = g->limits_now = spin_limits_for(g->size);
}

TUTTI_API int tutti_group_connect(tutti_group *g, int rank, int64_t pid, int fd, uint64_t bytes)
{
    if (rank < 0 || rank >= g->size || rank == g->rank || g->peers[rank].segment)
        return fail(TUTTI_BAD_ARGUMENT,
                    "rank %d of group %s cannot connect to rank %d, which is already connected or is "
                    "not another rank of the group",
                    g->rank, g->name, rank);
    layout l = compute_layout(g->size, g->slot_bytes * SLOTS);
    if (bytes != l.bytes)
        return fail(TUTTI_BAD_ARGUMENT,
                    "rank %d of group %s has a segment of %" PRIu64 " bytes, but rank %d has one of "
                    "%" PRIu64 " bytes. Every rank needs the same staging_bytes.",
                    rank, g->name, bytes, g->rank, l.bytes);
    tutti_segment *segment = tutti_segment_open(pid, fd, bytes);
    if (!segment)
        return tutti_error_code();
    const tutti_header *header = tutti_segment_base(segment);
    if (memcmp(header->magic, "TUTTISHM", 8) || header->abi != TUTTI_ABI ||
        header->token != g->token || header->rank != rank || header->size != g->size) {
        tutti_segment_close(segment);
        return fail(TUTTI_SYSTEM,
                    "descriptor %d of process %" PRId64 " is not the segment of rank %d of group "
                    "%s. All ranks must run on one host, with the same version of tutti.",
                    fd, pid, rank, g->name);
    }
    locate_parts(&g->peers[rank], segment, &l);
    if (++g->connected == g->size)
        set_spin_limits(g);
    return 0;
}

static bool in_forked_child(const tutti_group *g)
{
    return g->fork_generation != atomic_load_explicit(&fork_generation, memory_order_relaxed);
}

int refuse_forked_child(const tutti_group *g)
{
    if (in_forked_child(g))
        return fail(TUTTI_CLOSED, "group %s belongs to the parent of this forked process", g->name);
    return 0;
}

TUTTI_API void tutti_group_abort(tutti_group *g)
{
    if (in_forked_child(g))
        return;
    char text[256];
    snprintf(text, sizeof text, "rank %d has closed group %s", g->rank, g->name);
    break_group(g, TUTTI_CLOSED, text);
    wake_queue(g);
    p2p_abort(g);
}

TUTTI_API void tutti_group_close(tutti_group *g)
{
    if (!g || in_forked_child(g)) /* a forked child does not have the group's threads */
        return;
    tutti_group_abort(g);
    stop_workers(g);
    p2p_close(g);
    pthread_mutex_lock(&groups_lock);
    for (tutti_group **link = &groups; *link; link = &(*link)->next)
        if (*link == g) {
            *link = g->next;
            break;
        }
    pthread_mutex_unlock(&groups_lock);
    for (int rank = 0; rank < g->size; rank++)
        tutti_segment_close(g->peers[rank].segment);
    free_blocks(g);
    free_mappings(g);
    pthread_cond_destroy(&g->work_queued);
    pthread_cond_destroy(&g->collective_over);
    pthread_mutex_destroy(&g->lock);
    pthread_mutex_destroy(&g->broken_lock);
    pthread_mutex_destroy(&g->blocks_lock);
    free(g->broken_text);
    free(g->workers);
    free(g->sources);
    free(g->copies);
    free(g->peers);
    free(g);
}

TUTTI_API void tutti_note_location(const char *text)
{
    pthread_mutex_lock(&groups_lock);
    for (tutti_group *g = groups; g; g = g->next)
        if (!in_forked_child(g))
            write_location(g->peers[g->rank].location, text);
    pthread_mutex_unlock(&groups_lock);
}
