/* Who runs a collective, and when.
 *
 * Collectives run one at a time, in the order in which they were called; whoever runs one holds the
 * group's turn. A caller that finds no queue runs its own at once. Submitted ones wait in the queue
 * for a worker thread; a thread that waits for one of them runs the queue itself if nobody else
 * does, which saves the hand-over to another thread. One that waits only so long leaves it to the
 * worker: an operation cannot be left half-way, and takes as long as its slowest rank.
 *
 * A callback may wait for another operation (torch's communication hooks do). So operations are
 * done before their callbacks begin, a thread inside a callback runs no other operation (whose
 * callback, above it on the same stack, could wait for what the lower one has yet to do), and there
 * is a worker more whenever all are inside callbacks and the queue is not empty. */
#include "internal.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void begin_inside(tutti_group *g)
{
    g->inside++;
}

static void end_inside(tutti_group *g)
{
    if (--g->inside == 0 && g->closing)
        pthread_cond_broadcast(&g->turn_over);
}

static void take_turn(tutti_group *g)
{
    g->turn_taken = true;
}

static void give_turn(tutti_group *g)
{
    g->turn_taken = false;
    if (g->queue_head || g->inside > 1 || g->closing) {
        pthread_cond_broadcast(&g->turn_over);
        if (g->closing) /* all workers must see it */
            pthread_cond_broadcast(&g->work_queued);
        else if (g->queue_head)
            pthread_cond_signal(&g->work_queued);
    }
}

static int start_worker(tutti_group *);

/* Called with the lock and without the turn; runs the head of the queue. */
static void run_head(tutti_group *g, bool is_worker)
{
    tutti_work *work = g->queue_head;
    g->queue_head = work->next;
    if (!g->queue_head)
        g->queue_tail = NULL;
    take_turn(g);
    pthread_mutex_unlock(&g->lock);
    int code = group_usable(g);
    if (code == 0) {
        g->patience_now = is_worker ? patience_of_worker() : g->patience;
        ledger_mark(g, work->entry, TUTTI_RUNNING);
        code = run_collective(g, &work->operation, work->sequence, work->entry, work->timeout,
                              deadline_after(work->timeout));
    } else
        ledger_mark(g, work->entry, TUTTI_FAILED);
    pthread_mutex_lock(&g->lock);
    work_end(work, code, tutti_error());
    give_turn(g);
    pthread_cond_broadcast(&g->turn_over); /* who waits for it need not wait for the callback */
    g->ready -= is_worker;
    if (g->ready == 0 && g->queue_head && is_worker)
        start_worker(g);
    pthread_mutex_unlock(&g->lock);
    work_call_back(work);
    work_release(work);
    pthread_mutex_lock(&g->lock);
    g->ready += is_worker;
    if (g->closing)
        pthread_cond_broadcast(&g->turn_over);
}

static void *work_through(void *argument)
{
    tutti_group *g = argument;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        if (g->queue_head && !g->turn_taken)
            run_head(g, true);
        else if (g->closing && !g->queue_head)
            break;
        else
            pthread_cond_wait(&g->work_queued, &g->lock);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

static int start_worker(tutti_group *g)
{
    pthread_t *workers = realloc(g->workers, (size_t)(g->started + 1) * sizeof *workers);
    if (!workers)
        return fail(TUTTI_NO_MEMORY, "no memory for a thread of group %s", g->name);
    g->workers = workers;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the host language */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&g->workers[g->started], NULL, work_through, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return fail(TUTTI_SYSTEM, "cannot start a thread for group %s: %s", g->name,
                    strerror(code));
    g->started++;
    g->ready++;
    return 0;
}

static void enqueue(tutti_group *g, tutti_work *work, const tutti_operation *op)
{
    work->sequence = ++g->collectives;
    work->entry = ledger_open(g, op, work->sequence, TUTTI_QUEUED);
    if (g->queue_tail)
        g->queue_tail->next = work;
    else
        g->queue_head = work;
    g->queue_tail = work;
}

static int wait_in_turn(tutti_group *g, tutti_work *work, uint64_t deadline)
{
    int code = 0;
    pthread_mutex_lock(&g->lock);
    begin_inside(g);
    bool helps = deadline == FOREVER && !inside_callback();
    while (!tutti_work_is_done(work)) {
        if (!helps && g->queue_head && g->ready == 0)
            helps = start_worker(g) < 0; /* better here than never */
        if (helps && g->queue_head && !g->turn_taken) {
            run_head(g, false);
            continue;
        }
        if (deadline == FOREVER) {
            pthread_cond_wait(&g->turn_over, &g->lock);
            continue;
        }
        uint64_t now = now_ns();
        if (now >= deadline) {
            code = fail(TUTTI_TIMEOUT, "%s %llu of group %s is not done yet",
                        kind_name(work->operation.kind), (unsigned long long)work->sequence,
                        g->name);
            break;
        }
        struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u),
                                 .tv_nsec = (long)(deadline % 1000000000u)};
        pthread_cond_timedwait(&g->turn_over, &g->lock, &until);
    }
    end_inside(g);
    pthread_mutex_unlock(&g->lock);
    return code;
}

TUTTI_API int tutti_run(tutti_group *g, const tutti_operation *op, double timeout_s)
{
    int code = group_usable(g);
    if (code == 0)
        code = check_operation(g, op);
    if (code < 0)
        return code;
    if (op->kind >= TUTTI_SEND)
        return mail_run(g, op, timeout_s);
    pthread_mutex_lock(&g->lock);
    if (!g->turn_taken && !g->queue_head) {
        uint64_t sequence = ++g->collectives;
        begin_inside(g);
        take_turn(g);
        pthread_mutex_unlock(&g->lock);
        uint64_t entry = ledger_open(g, op, sequence, TUTTI_RUNNING);
        g->patience_now = g->patience;
        code = run_collective(g, op, sequence, entry, timeout_s, deadline_after(timeout_s));
        pthread_mutex_lock(&g->lock);
        give_turn(g);
        end_inside(g);
        pthread_mutex_unlock(&g->lock);
        return code;
    }
    tutti_work *work = work_create(g, op, timeout_s, NULL, NULL);
    if (work)
        enqueue(g, work, op);
    pthread_mutex_unlock(&g->lock);
    if (!work)
        return TUTTI_NO_MEMORY;
    code = tutti_work_wait(work, -1);
    tutti_work_free(work);
    return code;
}

TUTTI_API tutti_work *tutti_submit(tutti_group *g, const tutti_operation *op, double timeout_s,
                                   tutti_done done, void *argument)
{
    if (group_usable(g) < 0 || check_operation(g, op) < 0)
        return NULL;
    tutti_work *work = work_create(g, op, timeout_s, done, argument);
    if (!work)
        return NULL;
    if (op->kind >= TUTTI_SEND) {
        mail_submit(g, work, op->where);
        return work;
    }
    pthread_mutex_lock(&g->lock);
    if (g->ready == 0 && start_worker(g) < 0) {
        pthread_mutex_unlock(&g->lock);
        free(work);
        return NULL;
    }
    enqueue(g, work, op);
    if (!g->turn_taken)
        pthread_cond_signal(&g->work_queued);
    pthread_mutex_unlock(&g->lock);
    return work;
}

TUTTI_API int tutti_work_wait(tutti_work *work, double timeout_s)
{
    if (!tutti_work_is_done(work)) {
        /* Without a limit here: the operation has its own, and then it is done. */
        uint64_t deadline = timeout_s < 0 ? FOREVER : now_ns() + (uint64_t)(timeout_s * 1e9);
        int code = refuse_forked_child(work->group);
        if (code == 0)
            code = work->operation.kind >= TUTTI_SEND ? mail_wait(work, deadline)
                                                      : wait_in_turn(work->group, work, deadline);
        if (code < 0)
            return code;
    }
    return work->code < 0 ? fail(work->code, "%s", work->text ? work->text : "") : 0;
}

void wake_queue(tutti_group *g)
{
    pthread_mutex_lock(&g->lock);
    pthread_cond_broadcast(&g->work_queued);
    pthread_cond_broadcast(&g->turn_over);
    pthread_mutex_unlock(&g->lock);
}

void stop_worker(tutti_group *g)
{
    pthread_mutex_lock(&g->lock);
    g->closing = true;
    pthread_cond_broadcast(&g->work_queued);
    while (g->turn_taken || g->inside || (g->queue_head && !g->ready)) {
        if (g->queue_head && !g->turn_taken)
            run_head(g, false); /* the group is broken by now, so it fails at once */
        else
            pthread_cond_wait(&g->turn_over, &g->lock);
    }
    for (int i = 0; i < g->started; i++) { /* one that still calls back may start another */
        pthread_t worker = g->workers[i];
        pthread_mutex_unlock(&g->lock);
        pthread_join(worker, NULL);
        pthread_mutex_lock(&g->lock);
    }
    pthread_mutex_unlock(&g->lock);
}
