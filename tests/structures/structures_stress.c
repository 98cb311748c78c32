/* Stress test of the compiled structures: threads act as ranks and check every value they read. Built
 * with -fsanitize=thread or address,undefined by test_structures_compiled.py. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "structures.h"
#include "tutti_shm.h"

/* Long values under few keys: a reader is often overtaken while it copies. */
enum { THREADS = 4, WORDS = 129, KEYS = 3, ROWS = 2, COLUMNS = 7 };

static int rounds;
static void *memory[THREADS];
static tutti_map *maps[THREADS];
static tutti_rows *sums[THREADS], *versions[THREADS], *shared;
static uint64_t slot_sequence;
static uint64_t slot[512];

static void fail(const char *what) {
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
}

static void whole(const uint64_t *words, int count, const char *what) {
    for (int i = 1; i < count; ++i)
        if (words[i] != words[0])
            fail(what);
}

static uint32_t next(uint32_t *seed) { return *seed = *seed * 1664525u + 1013904223u; }

/* Values are WORDS equal words: a mixture of two would show. */
static void *use_map(void *argument) {
    int me = (int)(intptr_t)argument;
    uint32_t seed = (uint32_t)me + 1;
    uint64_t value[WORDS], ones[WORDS];
    for (int i = 0; i < WORDS; ++i)
        ones[i] = 1;
    for (int round = 0; round < rounds; ++round) {
        uint64_t key = next(&seed) % KEYS;
        for (int i = 0; i < WORDS; ++i)
            value[i] = seed;
        int code;
        switch (seed >> 30) {
        case 0:
            while ((code = tutti_map_put(maps[me], key, value)) <= TUTTI_BUSY)
                ;
            break;
        case 1:
            while ((code = tutti_map_delete(maps[me], key)) <= TUTTI_BUSY)
                ;
            break;
        default:
            while ((code = tutti_map_get(maps[me], key, value)) == TUTTI_OVERTAKEN)
                ;
            if (code == 1)
                whole(value, WORDS, "a torn value");
        }
        if (code < 0)
            fail("a write was refused");
        /* Nobody puts or deletes these: every addition must be there in the end. */
        while ((code = tutti_map_add(maps[me], KEYS + key % 4, ones, TUTTI_I64)) <= TUTTI_BUSY)
            ;
        if (code < 0)
            fail("an addition was refused");
    }
    return NULL;
}

static void *use_rows(void *argument) {
    int me = (int)(intptr_t)argument;
    uint32_t seed = (uint32_t)me + 77;
    float ones[COLUMNS];
    uint64_t row[WORDS];
    for (int i = 0; i < COLUMNS; ++i)
        ones[i] = 1;
    for (int round = 0; round < rounds; ++round) {
        int64_t index = next(&seed) % ROWS, code;
        if (tutti_rows_scatter_add(sums[me], &index, 1, ones, TUTTI_F32) != -1)
            fail("scatter_add");
        if (me < 2) {
            for (int i = 0; i < WORDS; ++i)
                row[i] = seed;
            while ((code = tutti_rows_publish(versions[me], (uint64_t)index, row)) <= TUTTI_BUSY)
                ;
        } else {
            while ((code = tutti_rows_lookup(versions[me], (uint64_t)index, row)) < 0)
                ;
            if (code)
                whole(row, WORDS, "a torn row");
        }
    }
    return NULL;
}

/* Rows of 28 bytes share words with their neighbours: each thread writes its own row and must find it
 * unchanged; rows of others may be half-way, but no element is torn. */
static void *use_shared_rows(void *argument) {
    int64_t me = (int64_t)(intptr_t)argument;
    float row[COLUMNS];
    for (int round = 0; round < rounds; ++round) {
        float value = (float)(round % 1000 + 1000 * (int)me);
        for (int i = 0; i < COLUMNS; ++i)
            row[i] = value;
        if (tutti_rows_scatter(shared, &me, 1, row) != -1)
            fail("scatter");
        int64_t other = round % THREADS;
        tutti_rows_gather(shared, &other, 1, row);
        for (int i = 0; i < COLUMNS; ++i)
            if (row[i] != 0 && ((int64_t)row[i] / 1000 != other || row[i] != (float)(int)row[i]))
                fail("a torn element of a row");
        tutti_rows_gather(shared, &me, 1, row);
        for (int i = 0; i < COLUMNS; ++i)
            if (row[i] != value)
                fail("a neighbour's write changed a row");
    }
    return NULL;
}

static void *use_slot(void *argument) {
    int me = (int)(intptr_t)argument;
    static _Thread_local uint64_t copy[512];
    for (int round = 0; round < rounds; ++round) {
        if (me == 0) {
            for (int i = 0; i < 512; ++i)
                copy[i] = (uint64_t)round;
            tutti_slot_begin(&slot_sequence);
            tutti_slot_write(slot, copy, sizeof slot);
            tutti_slot_end(&slot_sequence);
        } else {
            uint64_t sequence = __atomic_load_n(&slot_sequence, __ATOMIC_ACQUIRE);
            if (sequence % 2 == 0 &&
                tutti_slot_copy(copy, slot, sizeof slot, &slot_sequence, sequence))
                whole(copy, 512, "a torn slot");
        }
    }
    return NULL;
}

static void all_threads(void *(*work)(void *)) {
    pthread_t threads[THREADS];
    for (intptr_t i = 0; i < THREADS; ++i)
        if (pthread_create(threads + i, NULL, work, (void *)i))
            fail("no thread");
    for (int i = 0; i < THREADS; ++i)
        pthread_join(threads[i], NULL);
}

static void zeroed(uint64_t bytes) {
    for (int i = 0; i < THREADS; ++i) {
        free(memory[i]);
        memory[i] = aligned_alloc(64, (bytes + 63) / 64 * 64);
        memset(memory[i], 0, (bytes + 63) / 64 * 64);
    }
}

int main(int count, char **words) {
    rounds = count > 1 ? atoi(words[1]) : 20000;

    zeroed(tutti_map_shard_bytes(64, WORDS * 8));
    for (uint32_t i = 0; i < THREADS; ++i)
        maps[i] = tutti_map_create(memory, THREADS, i, 64, WORDS * 8);
    all_threads(use_map);
    uint64_t total = 0, live = 0, found = 0, value[WORDS];
    for (uint64_t key = 0; key < KEYS + 4; ++key) {
        int there = tutti_map_get(maps[0], key, value);
        found += (uint64_t)there;
        if (there && key >= KEYS) {
            whole(value, WORDS, "a torn sum");
            total += value[0];
        }
    }
    for (uint32_t i = 0; i < THREADS; ++i)
        live += tutti_map_live(maps[0], i);
    if (total != (uint64_t)rounds * THREADS)
        fail("additions were lost in the map");
    if (live != found)
        fail("the count of keys");
    /* A process that is killed before it counts leaves the counter of live keys too low. */
    for (uint32_t i = 0; i < THREADS; ++i) {
        ((uint64_t *)memory[i])[1] = 0;
        if (tutti_map_compact(maps[i]) != 0)
            fail("compaction");
    }
    for (uint64_t key = 0; key < KEYS + 4; ++key)
        found -= (uint64_t)tutti_map_get(maps[0], key, value);
    for (uint32_t i = 0; i < THREADS; ++i)
        live -= tutti_map_live(maps[0], i);
    if (found || live)
        fail("compaction lost keys");

    zeroed(ROWS * COLUMNS * 4 + 8);
    for (uint32_t i = 0; i < THREADS; ++i)
        sums[i] = tutti_rows_create(memory, THREADS, i, ROWS, COLUMNS * 4, COLUMNS * 4, 0);
    void *plain[THREADS];
    memcpy(plain, memory, sizeof plain);
    memset(memory, 0, sizeof memory);
    zeroed(ROWS * tutti_cell_bytes(WORDS * 8));
    for (uint32_t i = 0; i < THREADS; ++i)
        versions[i] = tutti_rows_create(memory, THREADS, i, ROWS, WORDS * 8,
                                        tutti_cell_bytes(WORDS * 8), 1);
    all_threads(use_rows);
    double sum = 0;
    for (int64_t index = 0; index < ROWS; ++index) {
        float row[COLUMNS];
        tutti_rows_gather(sums[0], &index, 1, row);
        for (int i = 0; i < COLUMNS; ++i)
            sum += row[i];
    }
    if (sum != (double)rounds * THREADS * COLUMNS)
        fail("additions were lost in rows");
    void *whole_table = aligned_alloc(64, 128);
    memset(whole_table, 0, 128);
    shared = tutti_rows_create(&whole_table, 1, 0, THREADS, COLUMNS * 4, COLUMNS * 4, 0);
    all_threads(use_shared_rows);
    tutti_rows_free(shared);
    free(whole_table);

    all_threads(use_slot);
    for (uint32_t i = 0; i < THREADS; ++i) {
        tutti_map_free(maps[i]);
        tutti_rows_free(sums[i]);
        tutti_rows_free(versions[i]);
        free(plain[i]);
        free(memory[i]);
    }
    puts("all values whole, no addition lost");
    return 0;
}
