/* The ledger: recording this rank's operations, and describing the operations of peers in error
 * messages.
 *
 * An entry is protected by a sequence lock, which is its `id`. The owner stores id 0, executes a
 * release fence, stores the fields (relaxed) and stores the new id (release). A reader loads the id
 * (acquire), loads the fields, executes an acquire fence and loads the id again. The fields are
 * valid if both loads returned the same id and this id is not 0. */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define RELAXED memory_order_relaxed

const char *kind_name(uint32_t kind)
{
    static const char *const names[] = {"barrier",        "all_reduce", "reduce",  "broadcast",
                                        "all_gather",     "reduce_scatter", "gather", "scatter",
                                        "all_to_all",     "send",       "recv"};
    return kind <= TUTTI_RECV ? names[kind] : "unknown operation";
}

uint64_t operation_bytes(const tutti_operation *operation)
{
    uint64_t in = 0, out = 0;
    for (uint32_t i = 0; i < operation->in_parts; i++)
        in += operation->in_bytes[i];
    for (uint32_t i = 0; i < operation->out_parts; i++)
        out += operation->out_bytes[i];
    return in > out ? in : out;
}

/* Text is stored as atomic words, because another process may read it at the same time. */
void text_to_words(_Atomic uint64_t *words, int n, const char *text)
{
    size_t length = text ? strlen(text) : 0, room = (size_t)n * 8 - 1;
    if (length > room)
        length = room;
    for (int i = 0; i < n; i++) {
        uint64_t word = 0;
        size_t at = (size_t)i * 8;
        if (at < length)
            memcpy(&word, text + at, length - at < 8 ? length - at : 8);
        atomic_store_explicit(&words[i], word, RELAXED);
        if (at + 8 > length) /* the terminating zero is written */
            break;
    }
}

void words_to_text(const _Atomic uint64_t *words, int n, char *text)
{
    for (int i = 0; i < n; i++) {
        uint64_t word = atomic_load_explicit(&words[i], RELAXED);
        memcpy(text + (size_t)i * 8, &word, 8);
    }
    text[(size_t)n * 8 - 1] = 0;
}

uint64_t ledger_open(tutti_group *g, const tutti_operation *operation, uint64_t sequence, int state)
{
    uint64_t id = atomic_fetch_add_explicit(&g->ledger_next, 1, RELAXED) + 1;
    tutti_entry *entry = &g->peers[g->rank].ledger[(id - 1) % TUTTI_LEDGER_ENTRIES];
    bool message = operation->kind >= TUTTI_SEND;
    uint64_t now = now_ns();
    atomic_store_explicit(&entry->id, 0, RELAXED);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&entry->sequence, sequence, RELAXED);
    atomic_store_explicit(&entry->kind, operation->kind, RELAXED);
    atomic_store_explicit(&entry->dtype, operation->dtype, RELAXED);
    atomic_store_explicit(&entry->reduce, operation->reduce, RELAXED);
    atomic_store_explicit(&entry->root, message ? operation->peer : operation->root, RELAXED);
    atomic_store_explicit(&entry->tag, operation->tag, RELAXED);
    atomic_store_explicit(&entry->state, (uint32_t)state, RELAXED);
    atomic_store_explicit(&entry->bytes, operation_bytes(operation), RELAXED);
    atomic_store_explicit(&entry->begun_ns, now, RELAXED);
    atomic_store_explicit(&entry->begun_realtime_ns, now + g->realtime_offset, RELAXED);
    atomic_store_explicit(&entry->ended_ns, 0, RELAXED);
    atomic_store_explicit(&entry->fingerprint, operation_fingerprint(operation), RELAXED);
    text_to_words(entry->where, TUTTI_WHERE_WORDS, operation->where);
    atomic_store_explicit(&entry->id, id, memory_order_release);
    return id;
}

static tutti_entry *own_entry(tutti_group *g, uint64_t id)
{
    tutti_entry *entry = &g->peers[g->rank].ledger[(id - 1) % TUTTI_LEDGER_ENTRIES];
    return atomic_load_explicit(&entry->id, RELAXED) == id ? entry : NULL;
}

void ledger_mark(tutti_group *g, uint64_t id, int state)
{
    tutti_entry *entry = own_entry(g, id);
    if (!entry)
        return;
    if (state == TUTTI_DONE || state == TUTTI_FAILED)
        atomic_store_explicit(&entry->ended_ns, now_ns(), RELAXED);
    atomic_store_explicit(&entry->state, (uint32_t)state, memory_order_release);
}

/* A copy of an entry with plain members. */
typedef struct {
    uint64_t id, sequence, bytes, begun, ended, fingerprint;
    uint32_t kind, dtype, reduce, state;
    int32_t root;
    char where[TUTTI_WHERE_WORDS * 8];
} record;

static bool read_record(const tutti_entry *entry, record *copy)
{
    copy->id = atomic_load_explicit(&entry->id, memory_order_acquire);
    copy->sequence = atomic_load_explicit(&entry->sequence, RELAXED);
    copy->kind = atomic_load_explicit(&entry->kind, RELAXED);
    copy->dtype = atomic_load_explicit(&entry->dtype, RELAXED);
    copy->reduce = atomic_load_explicit(&entry->reduce, RELAXED);
    copy->root = atomic_load_explicit(&entry->root, RELAXED);
    copy->state = atomic_load_explicit(&entry->state, RELAXED);
    copy->bytes = atomic_load_explicit(&entry->bytes, RELAXED);
    copy->begun = atomic_load_explicit(&entry->begun_ns, RELAXED);
    copy->ended = atomic_load_explicit(&entry->ended_ns, RELAXED);
    copy->fingerprint = atomic_load_explicit(&entry->fingerprint, RELAXED);
    words_to_text(entry->where, TUTTI_WHERE_WORDS, copy->where);
    atomic_thread_fence(memory_order_acquire);
    return copy->id && atomic_load_explicit(&entry->id, RELAXED) == copy->id;
}

/* Finds the entry that a rank opened last or, if `sequence` is not 0, the entry of that
 * collective. */
static bool find_record(const tutti_group *g, int rank, uint64_t sequence, record *found)
{
    bool any = false;
    for (int i = 0; i < TUTTI_LEDGER_ENTRIES; i++) {
        record next;
        if (!read_record(&g->peers[rank].ledger[i], &next))
            continue;
        if (sequence ? next.sequence != sequence || next.kind >= TUTTI_SEND
                     : any && next.id < found->id)
            continue;
        *found = next;
        any = true;
    }
    return any;
}

static double seconds_since(uint64_t then)
{
    uint64_t now = now_ns();
    return now > then ? (double)(now - then) / 1e9 : 0.0;
}

void describe_peer(const tutti_group *g, int rank, char *text, size_t room)
{
    const peer *peer = &g->peers[rank];
    char last[256] = "no operation yet", now_at[TUTTI_LOCATION_WORDS * 8 + 64] = "";
    record entry;
    if (find_record(g, rank, 0, &entry)) {
        bool over = entry.state == TUTTI_DONE || entry.state == TUTTI_FAILED;
        static const char *const states[] = {"queued", "running", "done", "failed"};
        snprintf(last, sizeof last, "last operation %" PRIu64 " %s, %s %.1f s%s%s%s",
                 entry.sequence, kind_name(entry.kind), states[entry.state & 3],
                 seconds_since(over ? entry.ended : entry.begun), over ? " ago" : "",
                 entry.where[0] ? ", called at " : "", entry.where);
    }
    uint64_t version = atomic_load_explicit(&peer->location->version, memory_order_acquire);
    if (version && version % 2 == 0) {
        char location[TUTTI_LOCATION_WORDS * 8];
        uint64_t seen = atomic_load_explicit(&peer->location->seen_ns, RELAXED);
        words_to_text(peer->location->text, TUTTI_LOCATION_WORDS, location);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&peer->location->version, RELAXED) == version)
            snprintf(now_at, sizeof now_at, "; now at %s, seen %.1f s ago", location,
                     seconds_since(seen));
    }
    snprintf(text, room, "rank %d (pid %" PRId64 ": %s%s)", rank, peer->header->pid, last, now_at);
}

static void describe_call(int rank, const record *entry, char *text, size_t room)
{
    char what[160] = "", root[32] = "", reduce[32] = "";
    if (entry->root >= 0)
        snprintf(root, sizeof root, ", root %d", entry->root);
    if (entry->kind == TUTTI_ALL_REDUCE || entry->kind == TUTTI_REDUCE ||
        entry->kind == TUTTI_REDUCE_SCATTER)
        snprintf(reduce, sizeof reduce, ", %s", reduce_name(entry->reduce));
    if (entry->kind != TUTTI_BARRIER)
        snprintf(what, sizeof what, " (%s%s, %" PRIu64 " bytes%s)", dtype_name(entry->dtype),
                 reduce, entry->bytes, root);
    snprintf(text, room, "rank %d called %s%s%s%s", rank, kind_name(entry->kind), what,
             entry->where[0] ? " at " : "", entry->where);
}

bool describe_difference(const tutti_group *g, int rank, char *text, size_t room)
{
    uint64_t last = g->running_sequence;
    uint64_t first = last > TUTTI_LEDGER_ENTRIES ? last - TUTTI_LEDGER_ENTRIES : 1;
    for (uint64_t sequence = first; sequence <= last; sequence++) {
        record own, other;
        if (!find_record(g, g->rank, sequence, &own) || !find_record(g, rank, sequence, &other) ||
            own.fingerprint == other.fingerprint || !own.fingerprint || !other.fingerprint)
            continue;
        char own_call[400], other_call[400];
        describe_call(g->rank, &own, own_call, sizeof own_call);
        describe_call(rank, &other, other_call, sizeof other_call);
        snprintf(text, room, "operation %" PRIu64 " of group %s differs between ranks: %s, %s",
                 sequence, g->name, own_call, other_call);
        return true;
    }
    return false;
}

void write_location(tutti_location *location, const char *text)
{
    uint64_t version = atomic_load_explicit(&location->version, RELAXED);
    atomic_store_explicit(&location->version, version + 1, RELAXED);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&location->seen_ns, now_ns(), RELAXED);
    text_to_words(location->text, TUTTI_LOCATION_WORDS, text);
    atomic_store_explicit(&location->version, version + 2, memory_order_release);
}
