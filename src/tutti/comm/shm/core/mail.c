/* Who moves messages, and who calls back for those that are over.
 *
 * A thread that waits for a message moves all of them meanwhile; a courier thread of the group does
 * so when nobody waits. A callback may wait for another operation, so whoever is about to call back
 * leaves the moving to another one, and what else is over lies where any thread finds it. For the
 * same reason a message is done before its callback begins, and a thread inside a callback only
 * waits: whatever it called back for could wait for what that very callback has yet to do. And so
 * does one that waits only so long: a callback may take longer.
 *
 * Why nothing is left lying: as long as operations are pending, some thread moves them or a courier
 * that is not in a callback has been told to. `relay` sees to it under the lock, whenever a mover
 * stops and whenever an operation comes in. A mover that sleeps has counted itself and then looked
 * once more under the lock, at the rings and at what is over; whoever changes either looks at the
 * sleepers afterwards and rings (mail.h). Those who sleep on `ended` look at their operation under
 * the lock; it is broadcast under the lock after the operation was marked as done. */
#include "mail.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum { PASSER, WAITER, COURIER } mover; /* a passer posts, or aborts, and goes on */

static int start_courier(tutti_group *);

/* With the lock: sees to it that somebody moves what is pending. */
static int relay(tutti_group *g)
{
    mail *m = g->mail;
    if (!m->pending)
        return 0;
    if (m->movers) {
        if (m->over.first)
            ring_for_mail(g->peers[g->rank].control);
        return 0;
    }
    if (m->ready == 0 && !m->closing) {
        int code = start_courier(g);
        if (code < 0)
            return code;
    }
    pthread_cond_signal(&m->left);
    return 0;
}

static void begin_moving(mail *m, mover who)
{
    m->movers += who != PASSER;
    m->ready += who == COURIER;
}

static int end_moving(tutti_group *g, mover who)
{
    g->mail->movers -= who != PASSER;
    g->mail->ready -= who == COURIER;
    return relay(g);
}

/* Called with the lock, which is let go for every callback. */
static void call_back_now(tutti_group *g, mover who)
{
    mail *m = g->mail;
    for (tutti_work *work; (work = mail_take_over(m)) != NULL;) {
        ledger_mark(g, work->entry, work->code < 0 ? TUTTI_FAILED : TUTTI_DONE);
        work_end(work, work->code, work->code < 0 ? g->broken_text : "");
        ring_for_mail(g->peers[g->rank].control);
        if (m->waiters)
            pthread_cond_broadcast(&m->ended);
        if (work->done) {
            end_moving(g, who);
            pthread_mutex_unlock(&m->lock);
            work_call_back(work);
            pthread_mutex_lock(&m->lock);
            begin_moving(m, who);
        }
        work_release(work);
    }
}

static void call_back(tutti_group *g, mover who)
{
    if (!inside_callback())
        call_back_now(g, who);
}

/* With the lock: nobody can be had who would move messages. */
static void give_up(tutti_group *g)
{
    char text[400];
    snprintf(text, sizeof text, "%s", tutti_error());
    mail_fail(g, break_group(g, TUTTI_SYSTEM, text));
    call_back_now(g, PASSER);
}

/* Until a message moves or another thread of this rank ends one; or for a while. */
static bool sleep_for_mail(tutti_group *g, const tutti_work *work, mover who)
{
    mail *m = g->mail;
    control *own = g->peers[g->rank].control;
    uint32_t heard = atomic_load_explicit(&own->mail_bell, memory_order_acquire);
    atomic_fetch_add_explicit(&own->mail_sleepers, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&m->lock);
    bool moved = mail_progress(g) || m->over.first;
    call_back(g, who);
    pthread_mutex_unlock(&m->lock);
    if (!moved && !(work && tutti_work_is_done(work)))
        sleep_on_bell(&own->mail_bell, heard);
    atomic_fetch_sub_explicit(&own->mail_sleepers, 1, memory_order_relaxed);
    return moved;
}

/* One step of a mover: moves what can be moved, or passes some time. */
static void pump(tutti_group *g, const tutti_work *work, pause_state *pause, mover who)
{
    mail *m = g->mail;
    bool should_look = false, moved = false;
    if (pthread_mutex_trylock(&m->lock) == 0) { /* else another thread is at it */
        moved = mail_progress(g) || m->over.first;
        call_back(g, who);
        pthread_mutex_unlock(&m->lock);
    }
    if (!moved && !pause_awake(pause, &should_look)) {
        moved = sleep_for_mail(g, work, who);
        should_look = true;
    }
    if (moved) {
        pause->turns = 0;
        return;
    }
    if (!should_look)
        return;
    pthread_mutex_lock(&m->lock);
    mail_look_for_trouble(g, pause);
    call_back(g, who);
    pthread_mutex_unlock(&m->lock);
}

static void *carry(void *argument)
{
    tutti_group *g = argument;
    mail *m = g->mail;
    pause_state pause = {.limit = patience_of_worker()};
    pthread_mutex_lock(&m->lock);
    while (!m->closing) {
        if (!m->pending || m->movers) {
            pthread_cond_wait(&m->left, &m->lock);
            pause.turns = 0;
            continue;
        }
        m->movers++;
        pthread_mutex_unlock(&m->lock);
        pump(g, NULL, &pause, COURIER);
        pthread_mutex_lock(&m->lock);
        m->movers--;
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

/* With the lock. Most messages fit into the ring, or are there already: they are over at once. */
static void post(tutti_group *g, tutti_work *work, const char *where, mover who)
{
    mail *m = g->mail;
    tutti_operation shown = work->operation;
    shown.where = where;
    work->deadline = deadline_after(work->timeout);
    work->sequence = ++m->messages;
    work->entry = ledger_open(g, &shown, work->sequence, TUTTI_RUNNING);
    m->pending++;
    if (work->operation.kind == TUTTI_SEND)
        mail_send(g, work);
    else
        mail_receive(g, work);
    call_back(g, who);
}

/* With the lock, which is let go meanwhile. */
static void pump_until_done(tutti_group *g, tutti_work *work)
{
    mail *m = g->mail;
    pause_state pause = {.limit = g->patience};
    pthread_mutex_unlock(&m->lock);
    while (!tutti_work_is_done(work))
        pump(g, work, &pause, WAITER);
    pthread_mutex_lock(&m->lock);
}

static int sleep_until_done(tutti_group *g, tutti_work *work, uint64_t deadline)
{
    mail *m = g->mail;
    if (relay(g) < 0)
        give_up(g);
    int code = 0;
    m->waiters++;
    while (!tutti_work_is_done(work) && !code) {
        struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u),
                                 .tv_nsec = (long)(deadline % 1000000000u)};
        if (deadline == FOREVER)
            pthread_cond_wait(&m->ended, &m->lock);
        else if (now_ns() < deadline)
            pthread_cond_timedwait(&m->ended, &m->lock, &until);
        else
            code = fail(TUTTI_TIMEOUT, "%s %" PRIu64 " of group %s is not done yet",
                        kind_name(work->operation.kind), work->sequence, g->name);
    }
    m->waiters--;
    return code;
}

static void begin_inside(mail *m)
{
    pthread_mutex_lock(&m->lock);
    m->inside++;
}

static void end_inside(mail *m)
{
    if (--m->inside == 0 && m->closing)
        pthread_cond_broadcast(&m->ended);
    pthread_mutex_unlock(&m->lock);
}

void mail_submit(tutti_group *g, tutti_work *work, const char *where)
{
    begin_inside(g->mail); /* it may be in another one's callback for long */
    post(g, work, where, PASSER);
    if (relay(g) < 0)
        give_up(g);
    end_inside(g->mail);
}

int mail_wait(tutti_work *work, uint64_t deadline)
{
    tutti_group *g = work->group;
    int code = 0;
    begin_inside(g->mail);
    if (deadline == FOREVER && !inside_callback()) {
        begin_moving(g->mail, WAITER);
        pump_until_done(g, work);
        end_moving(g, WAITER);
    } else
        code = sleep_until_done(g, work, deadline);
    end_inside(g->mail);
    return code;
}

int mail_run(tutti_group *g, const tutti_operation *op, double timeout)
{
    tutti_work *work = work_create(g, op, timeout, NULL, NULL);
    if (!work)
        return TUTTI_NO_MEMORY;
    begin_inside(g->mail);
    if (!inside_callback()) {
        begin_moving(g->mail, WAITER);
        post(g, work, op->where, WAITER);
        pump_until_done(g, work);
        end_moving(g, WAITER);
    } else {
        post(g, work, op->where, PASSER);
        sleep_until_done(g, work, FOREVER);
    }
    end_inside(g->mail);
    if (op->source)
        *op->source = work->source;
    int code = tutti_work_wait(work, -1);
    tutti_work_free(work);
    return code;
}

void mail_wake(tutti_group *g)
{
    begin_inside(g->mail); /* as long as it is in a callback, the group must not close */
    mail_fail(g, atomic_load(&g->broken));
    call_back(g, PASSER);
    relay(g);
    end_inside(g->mail);
}

void mail_close(tutti_group *g)
{
    mail *m = g->mail;
    pthread_mutex_lock(&m->lock);
    m->closing = true;
    pthread_cond_broadcast(&m->left);
    ring_for_mail(g->peers[g->rank].control);
    call_back_now(g, PASSER); /* what a callback that aborted has left to couriers */
    while (m->inside)
        pthread_cond_wait(&m->ended, &m->lock);
    pthread_mutex_unlock(&m->lock);
    for (int i = 0; i < m->started; i++)
        pthread_join(m->couriers[i], NULL);
    mail_free(m);
}
