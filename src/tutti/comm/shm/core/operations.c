/* Operations: checking arguments, work objects, and the queue of collectives of a group.
 *
 * Collectives of a group run one at a time, in the order of their calls (g->collective_runs). If
 * the queue is empty and no collective is running, a caller runs its own collective immediately.
 * Submitted collectives wait in the queue for a worker thread. A thread that waits for a submitted
 * collective runs the queue itself if no other thread does, which saves the switch to another
 * thread. A thread that waits with a time limit does not run the queue, because a collective cannot
 * be interrupted and takes as long as its slowest rank.
 *
 * A callback may wait for another operation (torch's communication hooks do). Therefore
 *   - operations are marked as done before their callbacks run,
 *   - a thread inside a callback runs no other operation, because that operation's callback, deeper
 *     on the same stack, might wait for the outer callback,
 *   - another worker is started if all workers are inside callbacks and the queue is not empty. */
#include "internal.h"

#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Arguments ---- */

typedef struct {
    uint32_t in, out;
} part_counts;

static part_counts parts_of(const tutti_group *g, const tutti_operation *operation)
{
    uint32_t n = (uint32_t)g->size;
    bool root = operation->root == g->rank;
    switch (operation->kind) {
    case TUTTI_ALL_REDUCE: return (part_counts){1, 1};
    case TUTTI_REDUCE: return (part_counts){1, root};
    case TUTTI_BROADCAST: return root ? (part_counts){1, 0} : (part_counts){0, 1};
    case TUTTI_ALL_GATHER: return (part_counts){1, n};
    case TUTTI_REDUCE_SCATTER: return (part_counts){n, 1};
    case TUTTI_GATHER: return (part_counts){1, root ? n : 0};
    case TUTTI_SCATTER: return (part_counts){root ? n : 0, 1};
    case TUTTI_ALL_TO_ALL: return (part_counts){n, n};
    case TUTTI_SEND: return (part_counts){1, 0};
    case TUTTI_RECV: return (part_counts){0, 1};
    default: return (part_counts){0, 0};
    }
}

static bool has_root(uint32_t kind)
{
    return kind == TUTTI_REDUCE || kind == TUTTI_BROADCAST || kind == TUTTI_GATHER ||
           kind == TUTTI_SCATTER;
}

static bool reduces(uint32_t kind)
{
    return kind == TUTTI_ALL_REDUCE || kind == TUTTI_REDUCE || kind == TUTTI_REDUCE_SCATTER;
}

/* Finds the input part and the output part that this rank exchanges with itself. The sizes of these
 * two parts must be equal. */
static bool own_parts(const tutti_group *g, const tutti_operation *operation, uint32_t *in,
                      uint32_t *out)
{
    if (!operation->in_parts || !operation->out_parts)
        return false;
    *in = operation->in_parts == 1 ? 0 : (uint32_t)g->rank;
    *out = operation->out_parts == 1 ? 0 : (uint32_t)g->rank;
    return true;
}

int check_operation(const tutti_group *g, const tutti_operation *operation)
{
    if (operation->kind > TUTTI_RECV)
        return fail(TUTTI_BAD_ARGUMENT, "operation kind %" PRIu32 " is unknown", operation->kind);
    const char *name = kind_name(operation->kind);
    if (operation->dtype > TUTTI_BYTES)
        return fail(TUTTI_BAD_ARGUMENT, "%s: dtype %" PRIu32 " is unknown", name, operation->dtype);
    if (has_root(operation->kind) && (operation->root < 0 || operation->root >= g->size))
        return fail(TUTTI_BAD_ARGUMENT, "%s: root %" PRId32 " is not a rank of group %s, which has %d ranks",
                    name, operation->root, g->name, g->size);
    if (operation->kind >= TUTTI_SEND) {
        int lowest = operation->kind == TUTTI_RECV ? -1 : 0;
        if (operation->peer < lowest || operation->peer >= g->size || operation->peer == g->rank)
            return fail(TUTTI_BAD_ARGUMENT,
                        "%s: peer %" PRId32 " is not another rank of group %s, which has %d ranks", name,
                        operation->peer, g->name, g->size);
    }
    part_counts expected = parts_of(g, operation);
    if (operation->in_parts != expected.in || operation->out_parts != expected.out)
        return fail(TUTTI_BAD_ARGUMENT,
                    "%s on rank %d takes %" PRIu32 " input parts and %" PRIu32
                    " output parts, got %" PRIu32 " and %" PRIu32,
                    name, g->rank, expected.in, expected.out, operation->in_parts,
                    operation->out_parts);
    for (uint32_t i = 0; i < operation->in_parts; i++)
        if (operation->in_bytes[i] && !operation->in[i])
            return fail(TUTTI_BAD_ARGUMENT, "%s: input part %" PRIu32 " is NULL", name, i);
    for (uint32_t i = 0; i < operation->out_parts; i++)
        if (operation->out_bytes[i] && !operation->out[i])
            return fail(TUTTI_BAD_ARGUMENT, "%s: output part %" PRIu32 " is NULL", name, i);
    uint32_t in, out;
    if (own_parts(g, operation, &in, &out) && operation->in_bytes[in] != operation->out_bytes[out])
        return fail(TUTTI_BAD_ARGUMENT,
                    "%s: rank %d sends itself %" PRIu64 " bytes but receives %" PRIu64, name, g->rank,
                    operation->in_bytes[in], operation->out_bytes[out]);
    if (!reduces(operation->kind))
        return 0;
    if (!can_reduce(operation->dtype, operation->reduce))
        return fail(TUTTI_BAD_ARGUMENT, "%s: %s of %s is not defined", name,
                    reduce_name(operation->reduce), dtype_name(operation->dtype));
    for (uint32_t i = 0; i < operation->in_parts; i++)
        if (operation->in_bytes[i] % dtype_bytes(operation->dtype))
            return fail(TUTTI_BAD_ARGUMENT, "%s: %" PRIu64 " bytes are not a whole number of %s elements",
                        name, operation->in_bytes[i], dtype_name(operation->dtype));
    return 0;
}

uint64_t hash_combine(uint64_t a, uint64_t b)
{
    uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 31);
}

uint64_t operation_fingerprint(const tutti_operation *operation)
{
    uint64_t hash = operation->kind | operation->dtype << 8 |
                     (reduces(operation->kind) ? operation->reduce << 16 : 0);
    hash = hash_combine(hash, (uint64_t)(uint32_t)operation->root << 1);
    switch (operation->kind) {
    case TUTTI_ALL_REDUCE:
    case TUTTI_REDUCE: hash = hash_combine(hash, operation->in_bytes[0]); break;
    case TUTTI_BROADCAST: hash = hash_combine(hash, operation_bytes(operation)); break;
    case TUTTI_ALL_GATHER:
        for (uint32_t i = 0; i < operation->out_parts; i++)
            hash = hash_combine(hash, operation->out_bytes[i]);
        break;
    case TUTTI_REDUCE_SCATTER:
        for (uint32_t i = 0; i < operation->in_parts; i++)
            hash = hash_combine(hash, operation->in_bytes[i]);
        break;
    default: break; /* no rank knows all sizes; they are compared with the first round's table */
    }
    return hash ? hash : 1;
}

/* ---- Work objects ---- */

tutti_work *work_create(tutti_group *g, const tutti_operation *op, double timeout, tutti_done done,
                        void *argument)
{
    size_t pointers = op->in_parts + op->out_parts;
    tutti_work *work = calloc(1, sizeof *work + pointers * (sizeof(void *) + sizeof(uint64_t)));
    if (!work) {
        fail(TUTTI_NO_MEMORY, "there is no memory for an operation of %zu parts", pointers);
        return NULL;
    }
    const void **in = (const void **)work->parts;
    void **out = work->parts + op->in_parts;
    uint64_t *in_bytes = (uint64_t *)(out + op->out_parts), *out_bytes = in_bytes + op->in_parts;
    for (uint32_t i = 0; i < op->in_parts; i++) {
        in[i] = op->in[i];
        in_bytes[i] = op->in_bytes[i];
    }
    for (uint32_t i = 0; i < op->out_parts; i++) {
        out[i] = op->out[i];
        out_bytes[i] = op->out_bytes[i];
    }
    work->operation = *op;
    work->operation.in = in;
    work->operation.in_bytes = in_bytes;
    work->operation.out = out;
    work->operation.out_bytes = out_bytes;
    work->operation.where = NULL; /* the caller owns the string, which only the ledger needs */
    work->operation.source = NULL;
    work->timeout = timeout;
    work->done = done;
    work->argument = argument;
    work->group = g;
    work->source = -1;
    atomic_init(&work->references, 2); /* one for the caller, one for the queue */
    return work;
}

void work_release(tutti_work *work)
{
    if (atomic_fetch_sub_explicit(&work->references, 1, memory_order_acq_rel) == 1) {
        free(work->text);
        free(work);
    }
}

static _Thread_local int callbacks; /* nesting depth on this thread */

bool inside_callback(void)
{
    return callbacks > 0;
}

void work_end(tutti_work *work, int code, const char *text)
{
    work->code = code;
    if (code < 0 && text) /* NULL: there was no memory for the message */
        work->text = strdup(text);
    atomic_store_explicit(&work->is_done, 1, memory_order_release);
}

void work_call_back(tutti_work *work)
{
    if (!work->done)
        return;
    callbacks++;
    work->done(work->argument, work->code, work->text ? work->text : "");
    callbacks--;
}

TUTTI_API int tutti_work_is_done(const tutti_work *work)
{
    return atomic_load_explicit(&work->is_done, memory_order_acquire);
}

TUTTI_API int32_t tutti_work_source(const tutti_work *work)
{
    return work->source;
}

TUTTI_API void tutti_work_free(tutti_work *work)
{
    if (work)
        work_release(work);
}

/* ---- The queue ---- */

static void begin_inside(tutti_group *g)
{
    g->inside++;
}

static void end_inside(tutti_group *g)
{
    if (--g->inside == 0 && g->closing)
        pthread_cond_broadcast(&g->collective_over);
}

static void begin_collective(tutti_group *g)
{
    g->collective_runs = true;
}

static void end_collective(tutti_group *g)
{
    g->collective_runs = false;
    if (g->queue_head || g->inside > 1 || g->closing) {
        pthread_cond_broadcast(&g->collective_over);
        if (g->closing) /* every worker must see `closing` */
            pthread_cond_broadcast(&g->work_queued);
        else if (g->queue_head)
            pthread_cond_signal(&g->work_queued);
    }
}

static int start_worker(tutti_group *);

/* Runs the head of the queue. Called with the lock held while no collective runs. */
static void run_head(tutti_group *g, bool is_worker)
{
    tutti_work *work = g->queue_head;
    g->queue_head = work->next;
    if (!g->queue_head)
        g->queue_tail = NULL;
    begin_collective(g);
    pthread_mutex_unlock(&g->lock);
    int code = group_usable(g);
    if (code == 0) {
        g->limits_now = is_worker ? worker_spin_limits() : g->limits;
        ledger_mark(g, work->entry, TUTTI_RUNNING);
        code = run_collective(g, &work->operation, work->sequence, work->entry, work->timeout,
                              deadline_after(work->timeout));
    } else
        ledger_mark(g, work->entry, TUTTI_FAILED);
    pthread_mutex_lock(&g->lock);
    work_end(work, code, tutti_error());
    end_collective(g);
    pthread_cond_broadcast(&g->collective_over); /* waiters need not wait for the callback */
    g->ready -= is_worker;
    if (g->ready == 0 && g->queue_head && is_worker)
        start_worker(g);
    pthread_mutex_unlock(&g->lock);
    work_call_back(work);
    work_release(work);
    pthread_mutex_lock(&g->lock);
    g->ready += is_worker;
    if (g->closing)
        pthread_cond_broadcast(&g->collective_over);
}

static void *worker_main(void *argument)
{
    tutti_group *g = argument;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        if (g->queue_head && !g->collective_runs)
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
        return fail(TUTTI_NO_MEMORY, "there is no memory for a thread of group %s", g->name);
    g->workers = workers;
    sigset_t all, before;
    sigfillset(&all); /* signals are handled by the threads of the application */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&g->workers[g->started], NULL, worker_main, g);
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

static int wait_for_work(tutti_group *g, tutti_work *work, uint64_t deadline)
{
    int code = 0;
    pthread_mutex_lock(&g->lock);
    begin_inside(g);
    bool helps = deadline == FOREVER && !inside_callback();
    while (!tutti_work_is_done(work)) {
        if (!helps && g->queue_head && g->ready == 0)
            helps = start_worker(g) < 0; /* no thread can be started: run the queue here */
        if (helps && g->queue_head && !g->collective_runs) {
            run_head(g, false);
            continue;
        }
        if (deadline == FOREVER) {
            pthread_cond_wait(&g->collective_over, &g->lock);
            continue;
        }
        uint64_t now = now_ns();
        if (now >= deadline) {
            code = fail(TUTTI_TIMEOUT, "%s %llu of group %s has not finished yet",
                        kind_name(work->operation.kind), (unsigned long long)work->sequence,
                        g->name);
            break;
        }
        struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u),
                                 .tv_nsec = (long)(deadline % 1000000000u)};
        pthread_cond_timedwait(&g->collective_over, &g->lock, &until);
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
        return p2p_run(g, op, timeout_s);
    pthread_mutex_lock(&g->lock);
    if (!g->collective_runs && !g->queue_head) {
        uint64_t sequence = ++g->collectives;
        begin_inside(g);
        begin_collective(g);
        pthread_mutex_unlock(&g->lock);
        uint64_t entry = ledger_open(g, op, sequence, TUTTI_RUNNING);
        g->limits_now = g->limits;
        code = run_collective(g, op, sequence, entry, timeout_s, deadline_after(timeout_s));
        pthread_mutex_lock(&g->lock);
        end_collective(g);
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
        p2p_submit(g, work, op->where);
        return work;
    }
    pthread_mutex_lock(&g->lock);
    if (g->ready == 0 && start_worker(g) < 0) {
        pthread_mutex_unlock(&g->lock);
        free(work);
        return NULL;
    }
    enqueue(g, work, op);
    if (!g->collective_runs)
        pthread_cond_signal(&g->work_queued);
    pthread_mutex_unlock(&g->lock);
    return work;
}

TUTTI_API int tutti_work_wait(tutti_work *work, double timeout_s)
{
    if (!tutti_work_is_done(work)) {
        /* A negative timeout_s means no limit, because the operation ends at its own timeout. */
        uint64_t deadline = timeout_s < 0 ? FOREVER : now_ns() + (uint64_t)(timeout_s * 1e9);
        int code = refuse_forked_child(work->group);
        if (code == 0)
            code = work->operation.kind >= TUTTI_SEND ? p2p_wait(work, deadline)
                                                      : wait_for_work(work->group, work, deadline);
        if (code < 0)
            return code;
    }
    return work->code < 0 ? fail(work->code, "%s", work->text ? work->text : "") : 0;
}

void wake_queue(tutti_group *g)
{
    pthread_mutex_lock(&g->lock);
    pthread_cond_broadcast(&g->work_queued);
    pthread_cond_broadcast(&g->collective_over);
    pthread_mutex_unlock(&g->lock);
}

void stop_workers(tutti_group *g)
{
    pthread_mutex_lock(&g->lock);
    g->closing = true;
    pthread_cond_broadcast(&g->work_queued);
    while (g->collective_runs || g->inside || (g->queue_head && !g->ready)) {
        if (g->queue_head && !g->collective_runs)
            run_head(g, false); /* the group is broken, so the operation fails immediately */
        else
            pthread_cond_wait(&g->collective_over, &g->lock);
    }
    for (int i = 0; i < g->started; i++) { /* a worker's callback may start another worker */
        pthread_t worker = g->workers[i];
        pthread_mutex_unlock(&g->lock);
        pthread_join(worker, NULL);
        pthread_mutex_lock(&g->lock);
    }
    pthread_mutex_unlock(&g->lock);
}
