/* Random operations between ranks that are threads of one process, so that ThreadSanitizer sees
 * both sides of every hand-over: all ranks draw the same operations, run them now or later, on
 * private, on symmetric or on exported memory, and check every element. Usage: RANKS SECONDS SEED */
#include "tutti_shm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 8
#define MOST 60000 /* elements of int32 */
#define IN_FLIGHT 6
#define STAGING (64 * 1024)
#define BLOCK ((uint64_t)IN_FLIGHT * MOST * 4)

static int ranks;
static double seconds;
static uint64_t seed;
static struct {
    int fd, heap_fd;
    uint64_t bytes;
} cards[MOST_RANKS];
static pthread_barrier_t all_here;
static atomic_int stop;
static atomic_long operations;

static uint64_t draw(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int32_t value(uint64_t operation, int rank, int part, uint64_t i)
{
    return (int32_t)((operation * 31 + (uint64_t)rank * 7 + (uint64_t)part * 3 + i) % 1000);
}

static int32_t sum(uint64_t operation, int part, uint64_t i)
{
    int32_t total = 0;
    for (int rank = 0; rank < ranks; rank++)
        total += value(operation, rank, part, i);
    return total;
}

static void die(const char *what, int rank, uint64_t operation)
{
    fprintf(stderr, "%s on rank %d in operation %llu: %s\n", what, rank,
            (unsigned long long)operation, tutti_error());
    exit(1);
}

typedef struct { /* one operation of one rank, with its memory */
    uint32_t kind;
    uint64_t number, count;
    int root, shift;
    int32_t *in, *out;
    tutti_operation call, back;
    const void *ins[MOST_RANKS];
    void *outs[MOST_RANKS];
    uint64_t in_bytes[MOST_RANKS], out_bytes[MOST_RANKS];
    tutti_work *work, *second;
} task;

/* How many of `count` elements belong to a part; uneven, and 0 for some. */
static uint64_t share(uint64_t count, int part)
{
    uint64_t n = (uint64_t)ranks, p = (uint64_t)part;
    return count * (p + 1) / n - count * p / n;
}

static void set_sizes(task *t, int rank)
{
    tutti_operation *call = &t->call;
    uint64_t whole = t->count * 4, own = share(t->count, rank) * 4;
    uint32_t n = (uint32_t)ranks, is_root = rank == t->root;
    for (int p = 0; p < ranks; p++) {
        uint64_t part = share(t->count, p) * 4;
        t->in_bytes[p] = t->out_bytes[p] = part;
        if (t->kind == TUTTI_ALL_TO_ALL) {
            t->in_bytes[p] = part * (uint64_t)(rank + 1) / n / 4 * 4;
            t->out_bytes[p] = own * (uint64_t)(p + 1) / n / 4 * 4;
        }
    }
    static const struct {
        int rooted, in, out, root_in, root_out; /* parts; -1: one for each rank */
    } shapes[] = {
        [TUTTI_ALL_REDUCE] = {0, 1, 1, 1, 1},      [TUTTI_REDUCE] = {1, 1, 0, 1, 1},
        [TUTTI_BROADCAST] = {1, 0, 1, 1, 0},       [TUTTI_ALL_GATHER] = {0, 1, -1, 1, -1},
        [TUTTI_REDUCE_SCATTER] = {0, -1, 1, -1, 1}, [TUTTI_GATHER] = {1, 1, 0, 1, -1},
        [TUTTI_SCATTER] = {1, 0, 1, -1, 1},        [TUTTI_ALL_TO_ALL] = {0, -1, -1, -1, -1},
        [TUTTI_SEND] = {0, 1, 0, 1, 0},
    };
    int in = is_root ? shapes[t->kind].root_in : shapes[t->kind].in;
    int out = is_root ? shapes[t->kind].root_out : shapes[t->kind].out;
    call->root = shapes[t->kind].rooted ? t->root : -1;
    call->in_parts = in < 0 ? n : (uint32_t)in;
    call->out_parts = out < 0 ? n : (uint32_t)out;
    if (in == 1)
        t->in_bytes[0] = t->kind == TUTTI_ALL_GATHER || t->kind == TUTTI_GATHER ? own : whole;
    if (out == 1)
        t->out_bytes[0] =
            t->kind == TUTTI_REDUCE_SCATTER || t->kind == TUTTI_SCATTER ? own : whole;
}

static void prepare(task *t, int rank)
{
    tutti_operation *call = &t->call;
    uint64_t whole = t->count * 4, at_in = 0, at_out = 0;
    *call = (tutti_operation){.kind = t->kind, .dtype = TUTTI_I32, .reduce = TUTTI_SUM, .root = -1,
                              .peer = -1, .in = t->ins, .in_bytes = t->in_bytes, .out = t->outs,
                              .out_bytes = t->out_bytes, .where = "stress.c:1 in prepare"};
    set_sizes(t, rank);
    for (uint32_t p = 0; p < call->in_parts; p++) {
        t->ins[p] = (char *)t->in + at_in;
        for (uint64_t i = 0; i < t->in_bytes[p] / 4; i++)
            t->in[at_in / 4 + i] = value(t->number, rank, (int)p, i);
        at_in += t->in_bytes[p];
    }
    for (uint32_t p = 0; p < call->out_parts; p++) {
        t->outs[p] = (char *)t->out + at_out;
        at_out += t->out_bytes[p];
    }
    if (t->kind == TUTTI_ALL_REDUCE && t->root == 0) /* in place */
        t->outs[0] = t->in;
    if (t->kind == TUTTI_SEND) { /* to one rank, from another */
        call->peer = (rank + t->shift) % ranks;
        call->tag = (uint32_t)t->number;
        t->back = *call;
        t->back.kind = TUTTI_RECV;
        t->back.peer = t->root % 2 ? -1 : (rank + ranks - t->shift) % ranks;
        t->back.in_parts = 0;
        t->back.out_parts = 1;
        t->outs[0] = t->out;
        t->out_bytes[0] = whole;
    }
}

static void check(const task *t, int rank)
{
    uint32_t outs = t->kind == TUTTI_SEND ? 1 : t->call.out_parts;
    for (uint32_t p = 0; p < outs; p++) {
        const int32_t *got = t->outs[p];
        for (uint64_t i = 0; i < t->out_bytes[p] / 4; i++) {
            int32_t expected = 0;
            switch (t->kind) {
            case TUTTI_ALL_REDUCE:
            case TUTTI_REDUCE: expected = sum(t->number, 0, i); break;
            case TUTTI_REDUCE_SCATTER: expected = sum(t->number, rank, i); break;
            case TUTTI_BROADCAST: expected = value(t->number, t->root, 0, i); break;
            case TUTTI_ALL_GATHER:
            case TUTTI_GATHER: expected = value(t->number, (int)p, 0, i); break;
            case TUTTI_SCATTER: expected = value(t->number, t->root, rank, i); break;
            case TUTTI_ALL_TO_ALL: expected = value(t->number, (int)p, rank, i); break;
            default: expected = value(t->number, (rank + ranks - t->shift) % ranks, 0, i); break;
            }
            if (got[i] != expected) {
                fprintf(stderr, "kind %u, part %u, element %llu of %llu: %d, not %d\n", t->kind, p,
                        (unsigned long long)i, (unsigned long long)t->out_bytes[p] / 4, got[i],
                        expected);
                die("wrong result", rank, t->number);
            }
        }
    }
}

static void be_done(void *argument, int code, const char *text)
{
    (void)text;
    if (code == 0)
        atomic_fetch_add((atomic_long *)argument, 1);
}

static void start(tutti_group *g, task *t, int rank, int now, atomic_long *finished)
{
    int message = t->kind == TUTTI_SEND;
    t->second = NULL;
    if (message && !(t->second = tutti_submit(g, &t->back, 60, be_done, finished)))
        die("submit", rank, t->number);
    if (now) {
        t->work = NULL;
        if (tutti_run(g, &t->call, 60) < 0)
            die("run", rank, t->number);
    } else if (!(t->work = tutti_submit(g, &t->call, 60, be_done, finished)))
        die("submit", rank, t->number);
}

static void end(task *t, int rank)
{
    tutti_work *works[] = {t->work, t->second};
    for (int i = 0; i < 2; i++) {
        if (works[i] && tutti_work_wait(works[i], -1) < 0)
            die("wait", rank, t->number);
        tutti_work_free(works[i]);
    }
    check(t, rank);
}

static void *be_rank(void *argument)
{
    int rank = (int)(intptr_t)argument;
    tutti_group *g = tutti_group_create("stress", rank, ranks, STAGING, seed);
    tutti_segment *heap = tutti_segment_create("stress-heap", BLOCK), *heaps[MOST_RANKS];
    void *bases[MOST_RANKS];
    if (!g || !heap)
        die("create", rank, 0);
    cards[rank].fd = tutti_group_fd(g);
    cards[rank].bytes = tutti_group_bytes(g);
    cards[rank].heap_fd = tutti_segment_fd(heap);
    pthread_barrier_wait(&all_here);
    for (int p = 0; p < ranks; p++) {
        if (p != rank && tutti_group_connect(g, p, getpid(), cards[p].fd, cards[p].bytes) < 0)
            die("connect", rank, 0);
        if (!(heaps[p] = tutti_segment_open(getpid(), cards[p].heap_fd, BLOCK)))
            die("open", rank, 0);
        bases[p] = tutti_segment_base(heaps[p]);
    }
    tutti_group_add_block(g, 5, bases, BLOCK);
    task tasks[IN_FLIGHT];
    int32_t *memory = malloc(BLOCK * 2), *exported = tutti_export_alloc(BLOCK);
    uint64_t common = seed, own = seed + 77 + (uint64_t)rank, number = 0;
    atomic_long finished = 0;
    long submitted = 0;
    time_t until = time(NULL) + (time_t)seconds;
    for (;;) {
        pthread_barrier_wait(&all_here);
        if (rank == 0 && time(NULL) >= until)
            atomic_store(&stop, 1);
        pthread_barrier_wait(&all_here);
        if (atomic_load(&stop))
            break;
        for (int batch = 0; batch < 20; batch++) {
            if (draw(&own) % 8 == 0) { /* peers have the old one mapped */
                tutti_export_free(exported);
                exported = tutti_export_alloc(BLOCK);
            }
            if (!exported)
                die("export", rank, number);
            int n = 1 + (int)(draw(&common) % IN_FLIGHT);
            for (int i = 0; i < n; i++) {
                task *t = &tasks[i];
                uint64_t size = draw(&common) % 8, mixed = draw(&common) % 4;
                t->kind = (uint32_t)(draw(&common) % (TUTTI_SEND + 1));
                t->number = ++number;
                uint64_t most = size == 0 ? MOST : size < 3 ? 5000 : size < 7 ? 200 : 1;
                t->count = draw(&common) % most;
                t->root = (int)(draw(&common) % (uint64_t)ranks);
                t->shift = ranks > 1 ? 1 + (int)(draw(&common) % (uint64_t)(ranks - 1)) : 0;
                if (ranks == 1 && t->kind == TUTTI_SEND)
                    t->kind = TUTTI_BARRIER;
                int symmetric = mixed == 0 || (mixed == 1 && draw(&own) % 2);
                int32_t *shared = draw(&own) % 2 ? exported : bases[rank];
                t->in = (symmetric ? shared : memory) + i * MOST;
                t->out = memory + (IN_FLIGHT + i) * MOST;
                prepare(t, rank);
                int now = t->kind != TUTTI_SEND && draw(&own) % 3 == 0;
                submitted += (now ? 0 : 1) + (t->kind == TUTTI_SEND);
                start(g, t, rank, now, &finished);
                if (draw(&own) % 16 == 0)
                    usleep((useconds_t)(draw(&own) % 200));
                tutti_note_location("stress.c:2 in be_rank");
            }
            for (int i = 0; i < n; i++)
                end(&tasks[(i + (int)(number % 3)) % n], rank);
            atomic_fetch_add(&operations, rank == 0 ? n : 0);
        }
    }
    tutti_group_close(g);
    if (atomic_load(&finished) != submitted)
        die("callbacks are missing", rank, number);
    tutti_export_free(exported);
    for (int p = 0; p < ranks; p++)
        tutti_segment_close(heaps[p]);
    tutti_segment_close(heap);
    free(memory);
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    ranks = atoi(arguments[1]);
    seconds = atof(arguments[2]);
    seed = (uint64_t)atoll(arguments[3]);
    pthread_t threads[MOST_RANKS];
    pthread_barrier_init(&all_here, NULL, (unsigned)ranks);
    for (int rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, be_rank, (void *)(intptr_t)rank);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    printf("%ld operations of %d ranks, all right\n", atomic_load(&operations), ranks);
    return 0;
}
