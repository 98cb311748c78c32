/* Messages: send and recv, with tags.
 *
 * For every ordered pair of ranks there is a ring in the sender's segment. A message is a header
 * and its bytes, streamed as room comes free; positions are multiples of GRAIN, so a header never
 * wraps around. The sender's position is stored with release after the bytes are written and loaded
 * with acquire before they are read; the receiver's position likewise frees room.
 *
 * Messages make progress independently of collectives, in whatever thread is waiting for one, or
 * else in the group's courier thread, always under the mail's lock. A message for which nobody
 * waits stays in its ring, until a recv of the same sender needs what lies behind it: then it is
 * put aside. */
#include "internal.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GRAIN 32
#define PIECE (32 * 1024) /* published at once, so that both sides copy at the same time */

typedef struct {
    uint64_t bytes;
    uint32_t tag, dtype;
    uint64_t unused[2];
} heading;
_Static_assert(sizeof(heading) == GRAIN, "a heading fills one grain of a ring");

typedef struct parcel { /* a message put aside */
    int source;
    uint32_t tag;
    uint64_t bytes, moved;
    struct parcel *next;
    unsigned char content[];
} parcel;

typedef struct { /* the message at the head of a ring, half-way out of it */
    bool active;
    uint64_t bytes, moved;
    tutti_work *receiver; /* or else: */
    parcel *aside;
} arrival;

typedef struct {
    tutti_work *first, *last;
} list;

struct mail {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    list *outgoing; /* by peer, in the order sent */
    list wanted;    /* recvs in the order posted */
    arrival *arrivals;
    parcel *aside;
    int pending, pumps; /* operations; threads that move them while they wait */
    bool started, closing;
    pthread_t courier;
    uint64_t messages;
};

static void append(list *to, tutti_work *work)
{
    work->next = NULL;
    if (to->last)
        to->last->next = work;
    else
        to->first = work;
    to->last = work;
}

static void take_out(list *from, tutti_work *work)
{
    tutti_work *before = NULL;
    for (tutti_work *at = from->first; at != work; at = at->next)
        before = at;
    *(before ? &before->next : &from->first) = work->next;
    if (from->last == work)
        from->last = before;
}

static void conclude(mail *m, list *over, tutti_work *work, int code)
{
    m->pending--;
    work->code = code;
    append(over, work);
}

/* Callbacks run without the lock. */
static void finish_all(tutti_group *g, list over)
{
    for (tutti_work *work = over.first, *next; work; work = next) {
        next = work->next;
        ledger_mark(g, work->entry, work->code < 0 ? TUTTI_FAILED : TUTTI_DONE);
        work_finish(work, work->code, work->code < 0 ? g->broken_text : "");
        work_release(work);
    }
}

static bool push(tutti_group *g, int to, list *over)
{
    list *queue = &g->mail->outgoing[to];
    unsigned char *ring = g->peers[g->rank].rings + lane(g->rank, to) * g->ring_bytes;
    _Atomic uint64_t *head_at = &g->peers[g->rank].sent[to].at;
    uint64_t head = atomic_load_explicit(head_at, memory_order_relaxed), begun = head;
    while (queue->first) {
        tutti_work *work = queue->first;
        uint64_t bytes = work->operation.in_bytes[0];
        uint64_t tail =
            atomic_load_explicit(&g->peers[to].received[g->rank].at, memory_order_acquire);
        uint64_t room = g->ring_bytes - (head - tail);
        if (!room)
            break;
        if (!work->started) {
            heading heading = {bytes, work->operation.tag, work->operation.dtype, {0, 0}};
            memcpy(ring + head % g->ring_bytes, &heading, GRAIN);
            work->started = true;
            head += GRAIN;
            room -= GRAIN;
        }
        uint64_t length = bytes - work->moved, straight = g->ring_bytes - head % g->ring_bytes;
        length = length < room ? length : room;
        length = length < straight ? length : straight;
        length = length < PIECE ? length : PIECE;
        if (length)
            memcpy(ring + head % g->ring_bytes,
                   (const unsigned char *)work->operation.in[0] + work->moved, length);
        work->moved += length;
        head += (length + GRAIN - 1) / GRAIN * GRAIN;
        atomic_store_explicit(head_at, head, memory_order_release);
        if (work->moved == bytes) {
            take_out(queue, work);
            conclude(g->mail, over, work, 0);
        }
    }
    return head != begun;
}

static bool wants(const tutti_work *receiver, int source, uint32_t tag)
{
    return (receiver->operation.peer == source || receiver->operation.peer == -1) &&
           receiver->operation.tag == tag;
}

static int wrong_size(tutti_group *g, tutti_work *receiver, int source, uint64_t bytes)
{
    char text[400];
    snprintf(text, sizeof text,
             "recv %" PRIu64 " of group %s on rank %d takes %" PRIu64
             " bytes from rank %d (tag %" PRIu32 "), which sent %" PRIu64,
             receiver->sequence, g->name, g->rank, receiver->operation.out_bytes[0], source,
             receiver->operation.tag, bytes);
    return break_group(g, TUTTI_MISMATCH, text);
}

/* Decides where the message at the head of a ring goes; false: nowhere yet. */
static bool open_arrival(tutti_group *g, int source, const heading *heading)
{
    mail *m = g->mail;
    tutti_work *receiver = m->wanted.first;
    while (receiver && !wants(receiver, source, heading->tag))
        receiver = receiver->next;
    parcel *aside = NULL;
    if (receiver) {
        if (receiver->operation.out_bytes[0] != heading->bytes) {
            wrong_size(g, receiver, source, heading->bytes);
            return false;
        }
        take_out(&m->wanted, receiver);
        receiver->source = source;
    } else {
        aside = malloc(sizeof *aside + heading->bytes);
        if (!aside) {
            char text[200];
            snprintf(text, sizeof text,
                     "no memory for %" PRIu64 " bytes from rank %d that nobody receives yet (tag %" PRIu32
                     ")",
                     heading->bytes, source, heading->tag);
            break_group(g, TUTTI_NO_MEMORY, text);
            return false;
        }
        *aside = (parcel){source, heading->tag, heading->bytes, 0, NULL};
        parcel **end = &m->aside;
        while (*end)
            end = &(*end)->next;
        *end = aside;
    }
    m->arrivals[source] = (arrival){true, heading->bytes, 0, receiver, aside};
    return true;
}

static bool source_is_wanted(const mail *m, int source)
{
    const arrival *arrival = &m->arrivals[source];
    if (arrival->active && arrival->receiver)
        return true;
    for (tutti_work *work = m->wanted.first; work; work = work->next)
        if (work->operation.peer == source || work->operation.peer == -1)
            return true;
    return false;
}

static bool pull(tutti_group *g, int source, list *over)
{
    mail *m = g->mail;
    arrival *arrival = &m->arrivals[source];
    const unsigned char *ring = g->peers[source].rings + lane(source, g->rank) * g->ring_bytes;
    _Atomic uint64_t *tail_at = &g->peers[g->rank].received[source].at;
    uint64_t tail = atomic_load_explicit(tail_at, memory_order_relaxed), begun = tail;
    while (source_is_wanted(m, source)) {
        uint64_t head =
            atomic_load_explicit(&g->peers[source].sent[g->rank].at, memory_order_acquire);
        uint64_t there = head - tail;
        if (!arrival->active) {
            heading heading;
            if (!there)
                break;
            memcpy(&heading, ring + tail % g->ring_bytes, GRAIN);
            if (!open_arrival(g, source, &heading))
                break;
            tail += GRAIN;
            there -= GRAIN;
        } else if (!there)
            break;
        uint64_t length = arrival->bytes - arrival->moved;
        uint64_t straight = g->ring_bytes - tail % g->ring_bytes;
        length = length < there ? length : there;
        length = length < straight ? length : straight;
        length = length < PIECE ? length : PIECE;
        unsigned char *to = arrival->receiver ? arrival->receiver->operation.out[0]
                                              : arrival->aside->content;
        if (length)
            memcpy(to + arrival->moved, ring + tail % g->ring_bytes, length);
        arrival->moved += length;
        if (arrival->aside)
            arrival->aside->moved = arrival->moved;
        tail += (length + GRAIN - 1) / GRAIN * GRAIN;
        atomic_store_explicit(tail_at, tail, memory_order_release);
        if (arrival->moved == arrival->bytes) {
            if (arrival->receiver)
                conclude(m, over, arrival->receiver, 0);
            arrival->active = false;
        }
    }
    return tail != begun;
}

/* A new recv may be for a message that was put aside, perhaps not all of it yet. */
static void post_receiver(tutti_group *g, tutti_work *work, list *over)
{
    mail *m = g->mail;
    parcel **link = &m->aside;
    while (*link && !wants(work, (*link)->source, (*link)->tag))
        link = &(*link)->next;
    parcel *found = *link;
    if (!found) {
        append(&m->wanted, work);
        return;
    }
    if (found->bytes != work->operation.out_bytes[0]) {
        int code = wrong_size(g, work, found->source, found->bytes);
        conclude(m, over, work, code);
        return;
    }
    *link = found->next;
    work->source = found->source;
    if (found->moved)
        memcpy(work->operation.out[0], found->content, found->moved);
    if (found->moved == found->bytes)
        conclude(m, over, work, 0);
    else {
        m->arrivals[found->source].receiver = work;
        m->arrivals[found->source].aside = NULL;
    }
    free(found);
}

static bool progress(tutti_group *g, list *over)
{
    bool moved = false;
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank)
            continue;
        if (g->mail->outgoing[rank].first)
            moved |= push(g, rank, over);
        moved |= pull(g, rank, over);
    }
    return moved;
}

static void fail_pending(tutti_group *g, int code, list *over)
{
    mail *m = g->mail;
    for (int rank = 0; rank < g->size; rank++) {
        while (m->outgoing[rank].first) {
            tutti_work *work = m->outgoing[rank].first;
            take_out(&m->outgoing[rank], work);
            conclude(m, over, work, code);
        }
        if (m->arrivals[rank].active && m->arrivals[rank].receiver) {
            conclude(m, over, m->arrivals[rank].receiver, code);
            m->arrivals[rank].active = false;
        }
    }
    while (m->wanted.first) {
        tutti_work *work = m->wanted.first;
        take_out(&m->wanted, work);
        conclude(m, over, work, code);
    }
}

static int message_trouble(tutti_group *g, tutti_work *work, int rank, uint64_t now, bool due)
{
    bool sends = work->operation.kind == TUTTI_SEND;
    char text[6000], who[600] = "any rank";
    snprintf(text, sizeof text, "%s %" PRIu64 " of group %s (tag %" PRIu32 ", %" PRIu64 " bytes)",
             kind_name(work->operation.kind), work->sequence, g->name, work->operation.tag,
             operation_bytes(&work->operation));
    size_t length = strlen(text);
    if (now >= work->deadline) {
        if (rank >= 0)
            describe_peer(g, rank, who, sizeof who);
        snprintf(text + length, sizeof text - length,
                 " timed out after %.1f s on rank %d: waiting for %s", work->timeout, g->rank, who);
        return break_group(g, TUTTI_TIMEOUT, text);
    }
    int left = 0, code = 0;
    for (int other = 0; other < g->size && !code; other++) {
        if (other == g->rank || (rank >= 0 && other != rank))
            continue;
        bool more = !sends && atomic_load(&g->peers[other].sent[g->rank].at) !=
                                  atomic_load(&g->peers[g->rank].received[other].at);
        code = more ? 0 : peer_trouble(g, other, due);
        if (code == TUTTI_PEER_LEFT && rank < 0 && ++left < g->size - 1)
            code = 0;
    }
    if (!code)
        return 0;
    snprintf(text + length, sizeof text - length, " on rank %d: %s", g->rank, tutti_error());
    return break_group(g, code, text);
}

/* Looks for operations that can no longer succeed. Called with the lock. */
static void look_for_trouble(tutti_group *g, pause_state *pause, list *over)
{
    mail *m = g->mail;
    uint64_t now = now_ns();
    bool due = life_check_is_due(pause, now);
    int code = atomic_load_explicit(&g->broken, memory_order_acquire);
    for (int rank = 0; rank < g->size && !code; rank++) {
        if (m->outgoing[rank].first)
            code = message_trouble(g, m->outgoing[rank].first, rank, now, due);
        if (!code && m->arrivals[rank].active && m->arrivals[rank].receiver)
            code = message_trouble(g, m->arrivals[rank].receiver, rank, now, due);
    }
    for (tutti_work *work = m->wanted.first; work && !code; work = work->next)
        code = message_trouble(g, work, work->operation.peer, now, due);
    if (code)
        fail_pending(g, code, over);
}

/* One step of whoever waits: moves what can be moved, or passes some time. */
static void pump(tutti_group *g, pause_state *pause)
{
    list over = {NULL, NULL};
    bool moved = false;
    if (pthread_mutex_trylock(&g->mail->lock) == 0) {
        moved = progress(g, &over);
        pthread_mutex_unlock(&g->mail->lock);
        finish_all(g, over);
    }
    if (moved)
        *pause = (pause_state){.limit = g->patience};
    else if (pause_once(pause)) {
        over = (list){NULL, NULL};
        pthread_mutex_lock(&g->mail->lock);
        look_for_trouble(g, pause, &over);
        pthread_mutex_unlock(&g->mail->lock);
        finish_all(g, over);
    }
}

static void *carry(void *argument)
{
    tutti_group *g = argument;
    mail *m = g->mail;
    pause_state pause = {.limit = g->patience};
    pthread_mutex_lock(&m->lock);
    while (!m->closing) {
        if (!m->pending || m->pumps) {
            pthread_cond_wait(&m->changed, &m->lock);
            pause = (pause_state){.limit = g->patience};
            continue;
        }
        pthread_mutex_unlock(&m->lock);
        pump(g, &pause);
        pthread_mutex_lock(&m->lock);
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

static int start_courier(tutti_group *g)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&g->mail->courier, NULL, carry, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return fail(TUTTI_SYSTEM, "cannot start a thread for messages of group %s: %s", g->name,
                    strerror(code));
    g->mail->started = true;
    return 0;
}

int mail_create(tutti_group *g)
{
    mail *m = calloc(1, sizeof *m);
    if (m) {
        m->outgoing = calloc((size_t)g->size, sizeof *m->outgoing);
        m->arrivals = calloc((size_t)g->size, sizeof *m->arrivals);
    }
    if (!m || !m->outgoing || !m->arrivals) {
        if (m) {
            free(m->outgoing);
            free(m->arrivals);
        }
        free(m);
        return fail(TUTTI_NO_MEMORY, "no memory for the messages of %d ranks", g->size);
    }
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->changed, NULL);
    g->mail = m;
    return 0;
}

/* Most messages fit into the ring, or are there already: they are over when this returns. */
static void post(tutti_group *g, tutti_work *work, const char *where, bool will_wait)
{
    mail *m = g->mail;
    list over = {NULL, NULL};
    tutti_operation shown = work->operation;
    shown.where = where;
    work->deadline = deadline_after(work->timeout);
    pthread_mutex_lock(&m->lock);
    work->sequence = ++m->messages;
    work->entry = ledger_open(g, &shown, work->sequence, TUTTI_RUNNING);
    m->pending++;
    if (work->operation.kind == TUTTI_SEND) {
        append(&m->outgoing[work->operation.peer], work);
        push(g, work->operation.peer, &over);
    } else {
        post_receiver(g, work, &over);
        for (int rank = 0; rank < g->size; rank++)
            if (rank != g->rank && (work->operation.peer == rank || work->operation.peer == -1))
                pull(g, rank, &over);
    }
    if (will_wait)
        m->pumps++;
    else if (m->pending && !m->started && start_courier(g) < 0) {
        char text[400];
        snprintf(text, sizeof text, "%s", tutti_error());
        fail_pending(g, break_group(g, TUTTI_SYSTEM, text), &over);
    }
    if (!will_wait && m->pending)
        pthread_cond_signal(&m->changed);
    pthread_mutex_unlock(&m->lock);
    finish_all(g, over);
}

static void stop_pumping(mail *m)
{
    pthread_mutex_lock(&m->lock);
    m->pumps--;
    if (m->closing || (m->pumps == 0 && m->pending))
        pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

static int pump_until(tutti_group *g, tutti_work *work, uint64_t deadline)
{
    pause_state pause = {.limit = g->patience};
    while (!tutti_work_is_done(work)) {
        pump(g, &pause);
        if (deadline != FOREVER && now_ns() >= deadline && !tutti_work_is_done(work))
            return fail(TUTTI_TIMEOUT, "%s %" PRIu64 " of group %s is not done yet",
                        kind_name(work->operation.kind), work->sequence, g->name);
    }
    return 0;
}

void mail_submit(tutti_group *g, tutti_work *work, const char *where)
{
    post(g, work, where, false);
}

int mail_wait(tutti_work *work, uint64_t deadline)
{
    mail *m = work->group->mail;
    pthread_mutex_lock(&m->lock);
    m->pumps++;
    pthread_mutex_unlock(&m->lock);
    int code = pump_until(work->group, work, deadline);
    stop_pumping(m);
    return code;
}

int mail_run(tutti_group *g, const tutti_operation *op, double timeout)
{
    tutti_work *work = work_create(g, op, timeout, NULL, NULL);
    if (!work)
        return TUTTI_NO_MEMORY;
    post(g, work, op->where, true);
    pump_until(g, work, FOREVER);
    stop_pumping(g->mail);
    if (op->source)
        *op->source = work->source;
    int code = tutti_work_wait(work, -1);
    tutti_work_free(work);
    return code;
}

void mail_wake(tutti_group *g)
{
    list over = {NULL, NULL};
    pthread_mutex_lock(&g->mail->lock);
    fail_pending(g, atomic_load(&g->broken), &over);
    pthread_mutex_unlock(&g->mail->lock);
    finish_all(g, over);
}

void mail_close(tutti_group *g)
{
    mail *m = g->mail;
    pthread_mutex_lock(&m->lock);
    m->closing = true;
    pthread_cond_broadcast(&m->changed);
    while (m->pumps)
        pthread_cond_wait(&m->changed, &m->lock);
    pthread_mutex_unlock(&m->lock);
    if (m->started)
        pthread_join(m->courier, NULL);
    while (m->aside) {
        parcel *next = m->aside->next;
        free(m->aside);
        m->aside = next;
    }
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->lock);
    free(m->outgoing);
    free(m->arrivals);
    free(m);
}
