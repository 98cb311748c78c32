/* Point-to-point messages: send and recv with tags, through rings in shared memory.
 *
 * For every ordered pair of ranks there is a ring in the sender's segment. A message in a ring is a
 * header followed by the message's bytes, which the sender writes as space in the ring becomes
 * free. Positions in a ring are multiples of ALIGN, so a header never wraps around. The sender
 * stores its position with release after it has written bytes, and the receiver loads that position
 * with acquire before it reads the bytes. In the other direction, the receiver stores its position
 * with release after it has read bytes, and the sender loads that position with acquire before it
 * writes to the freed space.
 *
 * Messages progress independently of collectives, always with the lock of p2p_state held. A message
 * that no recv matches stays in its ring until a recv from the same sender needs a later message.
 * Then the unmatched message is copied to an unexpected_message.
 *
 * Which thread moves bytes: a thread that waits for a message moves the bytes of all messages. If
 * no thread waits, a progress thread moves them. A callback may wait for another operation.
 * Therefore
 *   - a thread that is about to run a callback first hands progress to another thread,
 *   - completed operations are kept in a list, from which any thread takes them,
 *   - an operation is marked as done before its callback runs,
 *   - a thread inside a callback only waits, without running other callbacks, because another
 *     callback could wait for something that the outer callback has yet to do.
 * A thread that waits with a time limit also only waits, because a callback may take longer than
 * the limit.
 *
 * Why no operation is left without progress: while operations are pending, either a thread moves
 * messages, or a progress thread that is not inside a callback has been signalled.
 * ensure_progress() restores this condition with the lock held, whenever a thread stops moving
 * messages and whenever an operation is posted.
 *
 * Why no wake-up is lost: a thread that is about to sleep (the waiter) reads p2p_futex and
 * increments p2p_waiters. Then, with the lock held, the waiter checks the rings, the list of
 * completed operations, and errors. A thread that has changed a ring or completed an operation (the
 * changing side) loads p2p_waiters afterwards. (A rank that aborts increments every p2p_futex
 * without loading p2p_waiters: errors.c.) Both sides execute a sequentially consistent fence: the
 * waiter between the increment and the checks, the changing side between the change and the load.
 * So at least one side observes the other: either the waiter sees the change, or the changing side
 * sees the waiter in p2p_waiters. If the changing side sees the waiter, its acquire load
 * synchronizes with the waiter's increment of p2p_waiters. So the changing side increments
 * p2p_futex after the waiter's read of p2p_futex, and the kernel does not let the waiter sleep.
 * (With a relaxed load the waiter might read the new value of p2p_futex although the waiter checked
 * the rings before the change, and then sleep in spite of the change.)
 *
 * Threads that wait on `ended` check their operation with the lock held. `ended` is broadcast with
 * the lock held, after the operation was marked as done. */
#include "internal.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ALIGN 32
#define CHUNK (32 * 1024) /* bytes published at once, so that sender and receiver copy in parallel */

typedef struct {
    uint64_t bytes;
    uint32_t tag, dtype;
    uint64_t unused[2];
} message_header;
_Static_assert(sizeof(message_header) == ALIGN, "a header fills one unit of a ring");

typedef struct unexpected_message {
    int source;
    uint32_t tag;
    uint64_t bytes, moved;
    struct unexpected_message *next;
    unsigned char content[];
} unexpected_message;

typedef struct { /* the partly received message at the head of a ring */
    bool active;
    uint64_t bytes, moved;
    tutti_work *receiver; /* the recv that takes the bytes; if NULL, `unexpected` takes them */
    unexpected_message *unexpected;
} incoming;

typedef struct {
    tutti_work *first, *last;
} work_list;

/* The role of a thread in this file. A POSTER posts an operation (or aborts) and returns. A WAITER
 * waits for an operation and moves messages during the wait. A PROGRESS_THREAD is a thread of the
 * group that moves messages when no other thread does. */
typedef enum { POSTER, WAITER, PROGRESS_THREAD } role;

struct p2p_state {
    pthread_mutex_t lock;
    pthread_cond_t unattended; /* wakes a progress thread: no thread moves the pending messages */
    pthread_cond_t ended;      /* wakes threads that wait without moving messages */
    work_list *sends;          /* one list per peer, in the order of the calls */
    work_list receives;        /* recvs without a message yet, in the order of the calls */
    incoming *incoming;        /* one per peer */
    unexpected_message *unexpected;
    work_list completed; /* operations whose callbacks have not run yet */
    int pending;         /* posted operations that no thread has taken from `completed` yet */
    int movers;          /* threads that move messages now and are not inside a callback */
    int inside, waiters; /* number of threads inside a call; number that wait on `ended` */
    bool closing;
    pthread_t *threads;
    int started, ready; /* number of progress threads; number of them not inside a callback */
    uint64_t messages;
    store_sampler sampler;
};

/* ---- Lists and state ---- */

static void append(work_list *to, tutti_work *work)
{
    work->next = NULL;
    if (to->last)
        to->last->next = work;
    else
        to->first = work;
    to->last = work;
}

static void unlink_work(work_list *from, tutti_work *work)
{
    tutti_work *before = NULL;
    for (tutti_work *at = from->first; at != work; at = at->next)
        before = at;
    *(before ? &before->next : &from->first) = work->next;
    if (from->last == work)
        from->last = before;
}

static void complete(p2p_state *p, tutti_work *work, int code)
{
    work->code = code;
    append(&p->completed, work);
}

static tutti_work *take_completed(p2p_state *p)
{
    tutti_work *work = p->completed.first;
    if (work) {
        unlink_work(&p->completed, work);
        p->pending--;
    }
    return work;
}

int p2p_create(tutti_group *g)
{
    p2p_state *p = calloc(1, sizeof *p);
    if (p) {
        p->sends = calloc((size_t)g->size, sizeof *p->sends);
        p->incoming = calloc((size_t)g->size, sizeof *p->incoming);
    }
    if (!p || !p->sends || !p->incoming) {
        if (p) {
            free(p->sends);
            free(p->incoming);
        }
        free(p);
        return fail(TUTTI_NO_MEMORY, "there is no memory for the messages of %d ranks", g->size);
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&p->unattended, NULL);
    pthread_cond_init(&p->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    g->p2p = p;
    return 0;
}

static void p2p_free(p2p_state *p)
{
    free(p->threads);
    while (p->unexpected) {
        unexpected_message *next = p->unexpected->next;
        free(p->unexpected);
        p->unexpected = next;
    }
    pthread_cond_destroy(&p->unattended);
    pthread_cond_destroy(&p->ended);
    pthread_mutex_destroy(&p->lock);
    free(p->sends);
    free(p->incoming);
    free(p);
}

/* Called after bytes have moved or an operation has completed. Wakes the sleeping threads of the
 * rank that owns this control block. The fence orders this change before the load of
 * p2p_waiters. */
static void wake_p2p(control *control)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&control->p2p_waiters, memory_order_acquire))
        futex_wake_all(&control->p2p_futex);
}

/* ---- Rings. All functions of this section are called with the lock held. ---- */

static bool push(tutti_group *g, int to)
{
    work_list *queue = &g->p2p->sends[to];
    unsigned char *ring = g->peers[g->rank].rings + lane(g->rank, to) * g->ring_bytes;
    _Atomic uint64_t *head_at = &g->peers[g->rank].sent[to].at;
    uint64_t head = atomic_load_explicit(head_at, memory_order_relaxed), begun = head;
    while (queue->first) {
        tutti_work *work = queue->first;
        uint64_t bytes = work->operation.in_bytes[0];
        uint64_t tail =
            atomic_load_explicit(&g->peers[to].received[g->rank].at, memory_order_acquire);
        uint64_t free_bytes = g->ring_bytes - (head - tail);
        if (!free_bytes)
            break;
        if (!work->started) {
            message_header header = {bytes, work->operation.tag, work->operation.dtype, {0, 0}};
            memcpy(ring + head % g->ring_bytes, &header, ALIGN);
            work->started = true;
            head += ALIGN;
            free_bytes -= ALIGN;
        }
        uint64_t until_wrap = g->ring_bytes - head % g->ring_bytes;
        uint64_t length = min_u64(min_u64(bytes - work->moved, free_bytes), min_u64(until_wrap, CHUNK));
        copy_to_peer(&g->p2p->sampler, ring + head % g->ring_bytes,
                     (const unsigned char *)work->operation.in[0] + work->moved, length);
        work->moved += length;
        head += (length + ALIGN - 1) / ALIGN * ALIGN;
        atomic_store_explicit(head_at, head, memory_order_release);
        if (work->moved == bytes) {
            unlink_work(queue, work);
            complete(g->p2p, work, 0);
        }
    }
    if (head != begun)
        wake_p2p(g->peers[to].control);
    return head != begun;
}

static bool matches(const tutti_work *receiver, int source, uint32_t tag)
{
    return (receiver->operation.peer == source || receiver->operation.peer == -1) &&
           receiver->operation.tag == tag;
}

static int wrong_size(tutti_group *g, tutti_work *receiver, int source, uint64_t bytes)
{
    char text[400];
    snprintf(text, sizeof text,
             "recv %" PRIu64 " of group %s on rank %d expects %" PRIu64
             " bytes from rank %d (tag %" PRIu32 "), which sent %" PRIu64 " bytes",
             receiver->sequence, g->name, g->rank, receiver->operation.out_bytes[0], source,
             receiver->operation.tag, bytes);
    return break_group(g, TUTTI_MISMATCH, text);
}

/* Finds the recv for the message at the head of a ring, or allocates an unexpected_message. Returns
 * false after an error, which breaks the group. */
static bool open_incoming(tutti_group *g, int source, const message_header *header)
{
    p2p_state *p = g->p2p;
    tutti_work *receiver = p->receives.first;
    while (receiver && !matches(receiver, source, header->tag))
        receiver = receiver->next;
    unexpected_message *unexpected = NULL;
    if (receiver) {
        if (receiver->operation.out_bytes[0] != header->bytes) {
            wrong_size(g, receiver, source, header->bytes);
            return false;
        }
        unlink_work(&p->receives, receiver);
        receiver->source = source;
    } else {
        unexpected = malloc(sizeof *unexpected + header->bytes);
        if (!unexpected) {
            char text[200];
            snprintf(text, sizeof text,
                     "there is no memory for %" PRIu64 " bytes from rank %d (tag %" PRIu32
                     "), for which no recv was called yet",
                     header->bytes, source, header->tag);
            break_group(g, TUTTI_NO_MEMORY, text);
            return false;
        }
        *unexpected = (unexpected_message){source, header->tag, header->bytes, 0, NULL};
        unexpected_message **end = &p->unexpected;
        while (*end)
            end = &(*end)->next;
        *end = unexpected;
    }
    p->incoming[source] = (incoming){true, header->bytes, 0, receiver, unexpected};
    return true;
}

static bool source_is_wanted(const p2p_state *p, int source)
{
    const incoming *incoming = &p->incoming[source];
    if (incoming->active && incoming->receiver)
        return true;
    for (tutti_work *work = p->receives.first; work; work = work->next)
        if (work->operation.peer == source || work->operation.peer == -1)
            return true;
    return false;
}

static bool pull(tutti_group *g, int source)
{
    p2p_state *p = g->p2p;
    incoming *incoming = &p->incoming[source];
    const unsigned char *ring = g->peers[source].rings + lane(source, g->rank) * g->ring_bytes;
    _Atomic uint64_t *tail_at = &g->peers[g->rank].received[source].at;
    uint64_t tail = atomic_load_explicit(tail_at, memory_order_relaxed), begun = tail;
    while (source_is_wanted(p, source)) {
        uint64_t head =
            atomic_load_explicit(&g->peers[source].sent[g->rank].at, memory_order_acquire);
        uint64_t available = head - tail;
        if (!available)
            break;
        if (!incoming->active) {
            message_header header;
            memcpy(&header, ring + tail % g->ring_bytes, ALIGN);
            if (!open_incoming(g, source, &header))
                break;
            tail += ALIGN;
            available -= ALIGN;
        }
        uint64_t until_wrap = g->ring_bytes - tail % g->ring_bytes;
        uint64_t length = min_u64(min_u64(incoming->bytes - incoming->moved, available),
                                   min_u64(until_wrap, CHUNK));
        unsigned char *to = incoming->receiver ? incoming->receiver->operation.out[0]
                                               : incoming->unexpected->content;
        if (length)
            copy_bytes(to + incoming->moved, ring + tail % g->ring_bytes, length);
        incoming->moved += length;
        if (incoming->unexpected)
            incoming->unexpected->moved = incoming->moved;
        tail += (length + ALIGN - 1) / ALIGN * ALIGN;
        atomic_store_explicit(tail_at, tail, memory_order_release);
        if (incoming->moved == incoming->bytes) {
            if (incoming->receiver)
                complete(p, incoming->receiver, 0);
            incoming->active = false;
        }
    }
    if (tail != begun)
        wake_p2p(g->peers[source].control);
    return tail != begun;
}

/* Matches a new recv with the unexpected messages. The last unexpected message may still be
 * incomplete. */
static void post_receive(tutti_group *g, tutti_work *work)
{
    p2p_state *p = g->p2p;
    unexpected_message **link = &p->unexpected;
    while (*link && !matches(work, (*link)->source, (*link)->tag))
        link = &(*link)->next;
    unexpected_message *found = *link;
    if (!found) {
        append(&p->receives, work);
        return;
    }
    if (found->bytes != work->operation.out_bytes[0]) {
        int code = wrong_size(g, work, found->source, found->bytes);
        complete(p, work, code);
        return;
    }
    *link = found->next;
    work->source = found->source;
    if (found->moved)
        memcpy(work->operation.out[0], found->content, found->moved);
    if (found->moved == found->bytes)
        complete(p, work, 0);
    else {
        p->incoming[found->source].receiver = work;
        p->incoming[found->source].unexpected = NULL;
    }
    free(found);
}

static bool move_messages(tutti_group *g)
{
    bool moved = false;
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank)
            continue;
        if (g->p2p->sends[rank].first)
            moved |= push(g, rank);
        moved |= pull(g, rank);
    }
    return moved;
}

static void fail_messages(tutti_group *g, int code)
{
    p2p_state *p = g->p2p;
    for (int rank = 0; rank < g->size; rank++) {
        while (p->sends[rank].first) {
            tutti_work *work = p->sends[rank].first;
            unlink_work(&p->sends[rank], work);
            complete(p, work, code);
        }
        if (p->incoming[rank].active && p->incoming[rank].receiver) {
            complete(p, p->incoming[rank].receiver, code);
            p->incoming[rank].active = false;
        }
    }
    while (p->receives.first) {
        tutti_work *work = p->receives.first;
        unlink_work(&p->receives, work);
        complete(p, work, code);
    }
}

/* ---- Errors: timeouts, and peers that died, left or failed ---- */

static int message_error(tutti_group *g, tutti_work *work, int rank, uint64_t now, bool check_alive)
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
                 " timed out after %g s on rank %d: waiting for %s", work->timeout, g->rank, who);
        return break_group(g, TUTTI_TIMEOUT, text);
    }
    int left = 0, code = 0;
    for (int other = 0; other < g->size && !code; other++) {
        if (other == g->rank || (rank >= 0 && other != rank))
            continue;
        code = peer_error(g, other, check_alive);
        /* The ring is read after the peer's state, because messages that the peer sent before it
         * left or died still arrive. */
        if (code && !sends && !atomic_load(&g->broken) &&
            atomic_load(&g->peers[other].sent[g->rank].at) !=
                atomic_load(&g->peers[g->rank].received[other].at))
            code = 0;
        if (code == TUTTI_PEER_LEFT && rank < 0 && ++left < g->size - 1)
            code = 0;
    }
    if (!code)
        return 0;
    snprintf(text + length, sizeof text - length, " on rank %d: %s", g->rank, tutti_error());
    return break_group(g, code, text);
}

/* Called with the lock held: fails all operations if at least one operation can no longer succeed.
 * Every operation has its own deadline, so all deadlines are checked. An error of a peer affects
 * all messages to that peer equally, so only the first message to each peer is checked for it. */
static void check_errors(tutti_group *g, pause_state *pause)
{
    p2p_state *p = g->p2p;
    uint64_t now = now_ns();
    bool due = alive_check_due(pause, now);
    int code = atomic_load_explicit(&g->broken, memory_order_acquire);
    for (int rank = 0; rank < g->size && !code; rank++) {
        tutti_work *first = p->sends[rank].first;
        for (tutti_work *work = first; work && !code; work = work->next)
            if (work == first || now >= work->deadline)
                code = message_error(g, work, rank, now, due);
        if (!code && p->incoming[rank].active && p->incoming[rank].receiver)
            code = message_error(g, p->incoming[rank].receiver, rank, now, due);
    }
    for (tutti_work *work = p->receives.first; work && !code; work = work->next)
        code = message_error(g, work, work->operation.peer, now, due);
    if (code)
        fail_messages(g, code);
}

/* ---- Progress ---- */

static int start_progress_thread(tutti_group *);

/* Called with the lock held: makes sure that a thread moves the pending messages. */
static int ensure_progress(tutti_group *g)
{
    p2p_state *p = g->p2p;
    if (!p->pending)
        return 0;
    if (p->movers) {
        if (p->completed.first)
            wake_p2p(g->peers[g->rank].control);
        return 0;
    }
    if (p->ready == 0 && !p->closing) {
        int code = start_progress_thread(g);
        if (code < 0)
            return code;
    }
    pthread_cond_signal(&p->unattended);
    return 0;
}

static void begin_moving(p2p_state *p, role role)
{
    p->movers += role != POSTER;
    p->ready += role == PROGRESS_THREAD;
}

static int end_moving(tutti_group *g, role role)
{
    g->p2p->movers -= role != POSTER;
    g->p2p->ready -= role == PROGRESS_THREAD;
    return ensure_progress(g);
}

/* Called with the lock held. The lock is released during every callback. */
static void run_callbacks_now(tutti_group *g, role role)
{
    p2p_state *p = g->p2p;
    for (tutti_work *work; (work = take_completed(p)) != NULL;) {
        ledger_mark(g, work->entry, work->code < 0 ? TUTTI_FAILED : TUTTI_DONE);
        work_end(work, work->code, work->code < 0 ? g->broken_text : NULL);
        wake_p2p(g->peers[g->rank].control);
        if (p->waiters)
            pthread_cond_broadcast(&p->ended);
        if (work->done) {
            end_moving(g, role);
            pthread_mutex_unlock(&p->lock);
            work_call_back(work);
            pthread_mutex_lock(&p->lock);
            begin_moving(p, role);
        }
        work_release(work);
    }
}

static void run_callbacks(tutti_group *g, role role)
{
    if (!inside_callback())
        run_callbacks_now(g, role);
}

/* Called with the lock held, if no progress thread could be started. Fails all messages. */
static void give_up(tutti_group *g)
{
    char text[400];
    snprintf(text, sizeof text, "%s", tutti_error());
    fail_messages(g, break_group(g, TUTTI_SYSTEM, text));
    run_callbacks_now(g, POSTER);
}

/* Sleeps until a message moves, another thread of this rank completes an operation, or a rank
 * aborts, for at most 20 ms. Returns true, without sleeping, if bytes have moved or an operation
 * has completed. Errors are checked after the futex word was read. So an abort is either found by
 * this check, or changes the word after the read. */
static bool sleep_for_messages(tutti_group *g, const tutti_work *work, pause_state *pause, role role)
{
    p2p_state *p = g->p2p;
    control *own = g->peers[g->rank].control;
    uint32_t seen = atomic_load_explicit(&own->p2p_futex, memory_order_acquire);
    atomic_fetch_add_explicit(&own->p2p_waiters, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&p->lock);
    bool moved = move_messages(g) || p->completed.first;
    if (!moved) {
        check_errors(g, pause);
        moved = p->completed.first != NULL;
    }
    run_callbacks(g, role);
    pthread_mutex_unlock(&p->lock);
    if (!moved && !(work && tutti_work_is_done(work)))
        futex_wait(&own->p2p_futex, seen);
    atomic_fetch_sub_explicit(&own->p2p_waiters, 1, memory_order_relaxed);
    return moved;
}

/* One step of a thread that moves messages: moves bytes, or pauses once if no bytes can be
 * moved. */
static void make_progress(tutti_group *g, const tutti_work *work, pause_state *pause, role role)
{
    p2p_state *p = g->p2p;
    bool should_check = false, moved = false;
    if (pthread_mutex_trylock(&p->lock) == 0) { /* otherwise another thread moves messages */
        moved = move_messages(g) || p->completed.first;
        run_callbacks(g, role);
        pthread_mutex_unlock(&p->lock);
    }
    if (!moved && !pause_awake(pause, &should_check))
        moved = sleep_for_messages(g, work, pause, role); /* also checks for errors */
    if (moved) {
        pause->turns = 0;
        return;
    }
    if (!should_check)
        return;
    pthread_mutex_lock(&p->lock);
    check_errors(g, pause);
    run_callbacks(g, role);
    pthread_mutex_unlock(&p->lock);
}

static void *progress_main(void *argument)
{
    tutti_group *g = argument;
    p2p_state *p = g->p2p;
    pause_state pause = {.limit = worker_spin_limits()};
    pthread_mutex_lock(&p->lock);
    while (!p->closing) {
        if (!p->pending || p->movers) {
            pthread_cond_wait(&p->unattended, &p->lock);
            pause.turns = 0;
            continue;
        }
        p->movers++;
        pthread_mutex_unlock(&p->lock);
        make_progress(g, NULL, &pause, PROGRESS_THREAD);
        pthread_mutex_lock(&p->lock);
        p->movers--;
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static int start_progress_thread(tutti_group *g)
{
    p2p_state *p = g->p2p;
    pthread_t *threads = realloc(p->threads, (size_t)(p->started + 1) * sizeof *threads);
    if (!threads)
        return fail(TUTTI_NO_MEMORY, "there is no memory for a thread of group %s", g->name);
    p->threads = threads;
    sigset_t all, before;
    sigfillset(&all); /* signals are handled by the threads of the application */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&p->threads[p->started], NULL, progress_main, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return fail(TUTTI_SYSTEM, "cannot start a thread for messages of group %s: %s", g->name,
                    strerror(code));
    p->started++;
    p->ready++;
    return 0;
}

/* ---- Calls ---- */

/* Called with the lock held. Most operations complete at once: a sent message fits into the ring,
 * or the message to receive is already in the ring. */
static void post(tutti_group *g, tutti_work *work, const char *where, role role)
{
    p2p_state *p = g->p2p;
    tutti_operation recorded = work->operation;
    recorded.where = where;
    work->deadline = deadline_after(work->timeout);
    work->sequence = ++p->messages;
    work->entry = ledger_open(g, &recorded, work->sequence, TUTTI_RUNNING);
    p->pending++;
    int peer = work->operation.peer;
    if (work->operation.kind == TUTTI_SEND) {
        append(&p->sends[peer], work);
        push(g, peer);
    } else {
        post_receive(g, work);
        for (int rank = 0; rank < g->size; rank++)
            if (rank != g->rank && (peer == rank || peer == -1))
                pull(g, rank);
    }
    run_callbacks(g, role);
}

/* Called with the lock held. The lock is released while this thread moves messages. */
static void move_until_done(tutti_group *g, tutti_work *work)
{
    p2p_state *p = g->p2p;
    pause_state pause = {.limit = g->limits};
    pthread_mutex_unlock(&p->lock);
    while (!tutti_work_is_done(work))
        make_progress(g, work, &pause, WAITER);
    pthread_mutex_lock(&p->lock);
}

static int sleep_until_done(tutti_group *g, tutti_work *work, uint64_t deadline)
{
    p2p_state *p = g->p2p;
    if (ensure_progress(g) < 0)
        give_up(g);
    int code = 0;
    p->waiters++;
    while (!tutti_work_is_done(work) && !code) {
        struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u),
                                 .tv_nsec = (long)(deadline % 1000000000u)};
        if (deadline == FOREVER)
            pthread_cond_wait(&p->ended, &p->lock);
        else if (now_ns() < deadline)
            pthread_cond_timedwait(&p->ended, &p->lock, &until);
        else
            code = fail(TUTTI_TIMEOUT, "%s %" PRIu64 " of group %s has not finished yet",
                        kind_name(work->operation.kind), work->sequence, g->name);
    }
    p->waiters--;
    return code;
}

static void begin_inside(p2p_state *p)
{
    pthread_mutex_lock(&p->lock);
    p->inside++;
}

static void end_inside(p2p_state *p)
{
    if (--p->inside == 0 && p->closing)
        pthread_cond_broadcast(&p->ended);
    pthread_mutex_unlock(&p->lock);
}

void p2p_submit(tutti_group *g, tutti_work *work, const char *where)
{
    begin_inside(g->p2p); /* the group must not close while this thread runs callbacks */
    post(g, work, where, POSTER);
    if (ensure_progress(g) < 0)
        give_up(g);
    end_inside(g->p2p);
}

int p2p_wait(tutti_work *work, uint64_t deadline)
{
    tutti_group *g = work->group;
    int code = 0;
    begin_inside(g->p2p);
    if (deadline == FOREVER && !inside_callback()) {
        begin_moving(g->p2p, WAITER);
        move_until_done(g, work);
        end_moving(g, WAITER);
    } else
        code = sleep_until_done(g, work, deadline);
    end_inside(g->p2p);
    return code;
}

int p2p_run(tutti_group *g, const tutti_operation *op, double timeout)
{
    tutti_work *work = work_create(g, op, timeout, NULL, NULL);
    if (!work)
        return TUTTI_NO_MEMORY;
    begin_inside(g->p2p);
    if (!inside_callback()) {
        begin_moving(g->p2p, WAITER);
        post(g, work, op->where, WAITER);
        move_until_done(g, work);
        end_moving(g, WAITER);
    } else {
        post(g, work, op->where, POSTER);
        sleep_until_done(g, work, FOREVER);
    }
    end_inside(g->p2p);
    if (op->source)
        *op->source = work->source;
    int code = tutti_work_wait(work, -1);
    tutti_work_free(work);
    return code;
}

void p2p_abort(tutti_group *g)
{
    begin_inside(g->p2p); /* the group must not close while this thread runs a callback */
    fail_messages(g, atomic_load(&g->broken));
    run_callbacks(g, POSTER);
    ensure_progress(g);
    end_inside(g->p2p);
}

void p2p_close(tutti_group *g)
{
    p2p_state *p = g->p2p;
    pthread_mutex_lock(&p->lock);
    p->closing = true;
    pthread_cond_broadcast(&p->unattended);
    wake_p2p(g->peers[g->rank].control);
    run_callbacks_now(g, POSTER); /* callbacks that remain after an abort from inside a callback */
    while (p->inside)
        pthread_cond_wait(&p->ended, &p->lock);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->started; i++)
        pthread_join(p->threads[i], NULL);
    p2p_free(p);
}
