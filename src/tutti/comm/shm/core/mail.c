/* Who moves messages, and when they are given up.
 *
 * A thread that waits for a message moves all of them meanwhile; a courier thread of the group does
 * so when nobody waits. A callback may wait for another message, so a courier that is about to call
 * back leaves the moving to another one. */
#include "mail.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Callbacks run without the lock. */
static void finish_all(tutti_group *g, list over)
{
    for (tutti_work *work = over.first, *next; work; work = next) {
        next = work->next;
        ledger_mark(g, work->entry, work->code < 0 ? TUTTI_FAILED : TUTTI_DONE);
        work_finish(work, work->code, work->code < 0 ? g->broken_text : "");
        work_release(work);
    }
    if (over.first)
        ring_for_mail(g->peers[g->rank].control);
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
        code = peer_trouble(g, other, due);
        /* In this order: what it sent before it left, or died, still arrives. */
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
        mail_fail(g, code, over);
}

static int start_courier(tutti_group *);

static void finish_as_courier(tutti_group *g, list over, bool *carrying)
{
    mail *m = g->mail;
    if (!over.first)
        return;
    pthread_mutex_lock(&m->lock);
    if (*carrying)
        m->carrying = *carrying = false;
    if (--m->ready == 0 && m->pending && !m->closing)
        start_courier(g);
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    finish_all(g, over);
    pthread_mutex_lock(&m->lock);
    m->ready++;
    pthread_mutex_unlock(&m->lock);
}

static void finish(tutti_group *g, list over, bool *carrying)
{
    if (carrying)
        finish_as_courier(g, over, carrying);
    else
        finish_all(g, over);
}

static bool move_some(tutti_group *g, bool *carrying)
{
    list over = {NULL, NULL};
    if (pthread_mutex_trylock(&g->mail->lock))
        return false; /* another thread is at it */
    bool moved = mail_progress(g, &over);
    pthread_mutex_unlock(&g->mail->lock);
    finish(g, over, carrying);
    return moved;
}

/* Until a message moves or another thread of this rank ends one; or for a while. */
static bool sleep_for_mail(tutti_group *g, const tutti_work *work, bool *carrying)
{
    control *own = g->peers[g->rank].control;
    uint32_t heard = atomic_load_explicit(&own->mail_bell, memory_order_acquire);
    atomic_fetch_add_explicit(&own->mail_sleepers, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    bool moved = move_some(g, carrying);
    if (!moved && !(work && tutti_work_is_done(work)))
        sleep_on_bell(&own->mail_bell, heard);
    atomic_fetch_sub_explicit(&own->mail_sleepers, 1, memory_order_relaxed);
    return moved;
}

/* One step of whoever waits for `work`, or of a courier: moves what can be moved, or passes some
 * time. A courier says whether it is the one that carries, and is told whether it still is. */
static void pump(tutti_group *g, const tutti_work *work, pause_state *pause, bool *carrying)
{
    bool should_look = false, moved = move_some(g, carrying);
    if (!moved && !pause_awake(pause, &should_look)) {
        moved = sleep_for_mail(g, work, carrying);
        should_look = true;
    }
    if (moved) {
        pause->turns = 0;
        return;
    }
    if (!should_look)
        return;
    list over = {NULL, NULL};
    pthread_mutex_lock(&g->mail->lock);
    look_for_trouble(g, pause, &over);
    pthread_mutex_unlock(&g->mail->lock);
    finish(g, over, carrying);
}

static void *carry(void *argument)
{
    tutti_group *g = argument;
    mail *m = g->mail;
    pause_state pause = {.limit = patience_of_worker()};
    pthread_mutex_lock(&m->lock);
    while (!m->closing) {
        if (!m->pending || m->pumps || m->carrying) {
            pthread_cond_wait(&m->changed, &m->lock);
            pause.turns = 0;
            continue;
        }
        bool carrying = m->carrying = true;
        pthread_mutex_unlock(&m->lock);
        pump(g, NULL, &pause, &carrying);
        pthread_mutex_lock(&m->lock);
        if (carrying)
            m->carrying = false;
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

static int start_courier(tutti_group *g)
{
    mail *m = g->mail;
    pthread_t *couriers = realloc(m->couriers, (size_t)(m->started + 1) * sizeof *couriers);
    if (!couriers)
        return fail(TUTTI_NO_MEMORY, "no memory for a thread of group %s", g->name);
    m->couriers = couriers;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&m->couriers[m->started], NULL, carry, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return fail(TUTTI_SYSTEM, "cannot start a thread for messages of group %s: %s", g->name,
                    strerror(code));
    m->started++;
    m->ready++;
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
    if (work->operation.kind == TUTTI_SEND)
        mail_send(g, work, &over);
    else
        mail_receive(g, work, &over);
    if (will_wait)
        m->pumps++;
    else if (m->pending && m->ready == 0 && start_courier(g) < 0) {
        char text[400];
        snprintf(text, sizeof text, "%s", tutti_error());
        mail_fail(g, break_group(g, TUTTI_SYSTEM, text), &over);
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
        pump(g, work, &pause, NULL);
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
    mail_fail(g, atomic_load(&g->broken), &over);
    pthread_mutex_unlock(&g->mail->lock);
    finish_all(g, over);
}

void mail_close(tutti_group *g)
{
    mail *m = g->mail;
    pthread_mutex_lock(&m->lock);
    m->closing = true;
    pthread_cond_broadcast(&m->changed);
    ring_for_mail(g->peers[g->rank].control);
    while (m->pumps)
        pthread_cond_wait(&m->changed, &m->lock);
    pthread_mutex_unlock(&m->lock);
    for (int i = 0; i < m->started; i++)
        pthread_join(m->couriers[i], NULL);
    free(m->couriers);
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
