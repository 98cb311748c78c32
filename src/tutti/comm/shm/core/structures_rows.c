/* Rows sharded over ranks, plain or versioned, and slots that are copied while they may change.
 * cell.h explains why versioned rows cannot be torn.
 *
 * Plain rows have weaker guarantees: an element of 1, 2, 4 or 8 bytes at its natural alignment is
 * never torn, and scatter_add loses no addition, but a row that is gathered while another rank
 * writes it may contain some elements from before the write and some from after it. Plain rows are
 * accessed with relaxed atomics, in the aligned 8-byte words that contain them (or 16 bytes at
 * once, see has_wide_access). A word that a row shares with its neighbour is changed by
 * compare-and-swap. A barrier or a signal (release and acquire) must order a write on one rank
 * before a read on another rank. */
#include <stdlib.h>
#include <string.h>

#include "cell.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { PREFETCH_AHEAD = 4, PREFETCH_BYTES = 256 };

struct tutti_rows {
    uint64_t rows, row_bytes, stride, per_rank;
    uint32_t size, rank, cyclic;
    uint64_t lookups, retries;
    uint8_t dead[TUTTI_MAX_RANKS];
    char *bases[];
};

tutti_rows *tutti_rows_create(void *const *bases, uint32_t size, uint32_t rank, uint64_t rows,
                              uint64_t row_bytes, uint64_t stride, uint32_t cyclic) {
    if (size == 0 || size > TUTTI_MAX_RANKS || rank >= size)
        return NULL;
    tutti_rows *table = calloc(1, sizeof *table + size * sizeof *table->bases);
    if (!table)
        return NULL;
    table->rows = rows;
    table->row_bytes = row_bytes;
    table->stride = stride;
    table->per_rank = (rows + size - 1) / size;
    table->size = size;
    table->rank = rank;
    table->cyclic = cyclic;
    for (uint32_t r = 0; r < size; ++r)
        table->bases[r] = bases[r];
    return table;
}

void tutti_rows_free(tutti_rows *table) { free(table); }

static inline char *row_at(const tutti_rows *table, uint64_t index) {
    uint64_t divisor = table->cyclic ? table->size : table->per_rank;
    uint64_t quotient = index / divisor, rest = index % divisor;
    if (table->cyclic)
        return table->bases[rest] + quotient * table->stride;
    return table->bases[quotient] + rest * table->stride;
}

static int64_t first_out_of_range(const tutti_rows *table, const int64_t *indices, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i)
        if ((uint64_t)indices[i] >= table->rows)
            return (int64_t)i;
    return -1;
}

/* Rows are accessed in no particular order, so the first cache lines of a later row are fetched
 * while the current row is copied. */
static inline void prefetch(const tutti_rows *table, const int64_t *indices, uint64_t i,
                            uint64_t count) {
    if (i + PREFETCH_AHEAD >= count)
        return;
    const char *row = row_at(table, (uint64_t)indices[i + PREFETCH_AHEAD]);
    for (uint64_t at = 0; at < table->row_bytes && at < PREFETCH_BYTES; at += 64)
        __builtin_prefetch(row + at);
}

/* For rows that are aligned to 16 bytes: these functions copy the bulk of a row in units of 64
 * bytes and return the number of bytes copied. Intel and AMD guarantee that processors with AVX
 * access 16 aligned bytes at once. So no element is torn, and the copy is twice as fast as with
 * 8-byte words. Assembly is used, because C has no relaxed 16-byte atomic without a library
 * call. */
#if defined(__x86_64__)
static inline int has_wide_access(const char *row, uint64_t bytes) {
    return bytes >= 64 && (uintptr_t)row % 16 == 0 && __builtin_cpu_supports("avx");
}

static inline uint64_t load_wide(char *to, const char *row, uint64_t bytes) {
    uint64_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
        const __m128i *from = (const __m128i *)(row + at);
        __m128i part[4];
        for (int i = 0; i < 4; ++i)
            __asm__ volatile("movdqa %1, %0" : "=x"(part[i]) : "m"(from[i]));
        for (int i = 0; i < 4; ++i)
            _mm_storeu_si128((__m128i *)(to + at) + i, part[i]);
    }
    return at;
}

static inline uint64_t store_wide(char *row, const char *from, uint64_t bytes) {
    uint64_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
        __m128i *to = (__m128i *)(row + at);
        for (int i = 0; i < 4; ++i) {
            __m128i part = _mm_loadu_si128((const __m128i *)(from + at) + i);
            __asm__ volatile("movdqa %1, %0" : "=m"(to[i]) : "x"(part));
        }
    }
    return at;
}
#else
static inline int has_wide_access(const char *row, uint64_t bytes) {
    (void)row, (void)bytes;
    return 0;
}

static inline uint64_t load_wide(char *to, const char *row, uint64_t bytes) {
    (void)to, (void)row, (void)bytes;
    return 0;
}

static inline uint64_t store_wide(char *row, const char *from, uint64_t bytes) {
    (void)row, (void)from, (void)bytes;
    return 0;
}
#endif

/* Copies `bytes` bytes from any address of shared memory, by loading whole words. */
static inline void load_row(char *to, const char *row, uint64_t bytes) {
    const uint64_t *word = (const uint64_t *)((uintptr_t)row & ~(uintptr_t)7);
    uint64_t before = (uintptr_t)row & 7;
    if (bytes == 4 && before % 4 == 0) { /* one float or int32 */
        uint64_t both = __atomic_load_n(word, __ATOMIC_RELAXED);
        memcpy(to, (const char *)&both + before, 4);
        return;
    }
    if (has_wide_access(row, bytes)) {
        uint64_t done = load_wide(to, row, bytes);
        words_load(to + done, word + done / 8, bytes - done);
        return;
    }
    if (before) { /* the row begins inside a word */
        uint64_t first = __atomic_load_n(word++, __ATOMIC_RELAXED);
        uint64_t part = bytes < 8 - before ? bytes : 8 - before;
        memcpy(to, (const char *)&first + before, part);
        to += part;
        bytes -= part;
    }
    words_load(to, word, bytes);
}

/* Stores `bytes` bytes of `from` at an offset inside a word. Other ranks may change the other bytes
 * of the word. */
static inline void store_in_word(uint64_t *word, uint64_t offset, const char *from, uint64_t bytes) {
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED), next;
    do {
        next = seen;
        memcpy((char *)&next + offset, from, bytes);
    } while (!__atomic_compare_exchange_n(word, &seen, next, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

static inline void store_row(char *row, const char *from, uint64_t bytes) {
    uint64_t *word = (uint64_t *)((uintptr_t)row & ~(uintptr_t)7);
    uint64_t before = (uintptr_t)row & 7;
    if (bytes == 4 && before % 4 == 0) {
        store_in_word(word, before, from, 4);
        return;
    }
    if (has_wide_access(row, bytes)) {
        uint64_t done = store_wide(row, from, bytes);
        word += done / 8;
        from += done;
        bytes -= done;
    }
    if (before) {
        uint64_t part = bytes < 8 - before ? bytes : 8 - before;
        store_in_word(word++, before, from, part);
        from += part;
        bytes -= part;
    }
    words_store(word, from, bytes / 8 * 8);
    if (bytes % 8)
        store_in_word(word + bytes / 8, 0, from + bytes / 8 * 8, bytes % 8);
}

int64_t tutti_rows_gather(const tutti_rows *table, const int64_t *indices, uint64_t count,
                          void *out) {
    int64_t bad = first_out_of_range(table, indices, count);
    char *to = out;
    for (uint64_t i = 0; bad < 0 && i < count; ++i, to += table->row_bytes) {
        prefetch(table, indices, i, count);
        load_row(to, row_at(table, (uint64_t)indices[i]), table->row_bytes);
    }
    return bad;
}

int64_t tutti_rows_scatter(const tutti_rows *table, const int64_t *indices, uint64_t count,
                           const void *values) {
    int64_t bad = first_out_of_range(table, indices, count);
    const char *from = values;
    for (uint64_t i = 0; bad < 0 && i < count; ++i, from += table->row_bytes) {
        prefetch(table, indices, i, count);
        store_row(row_at(table, (uint64_t)indices[i]), from, table->row_bytes);
    }
    return bad;
}

/* Adds to the bytes of a word that `mask` covers. Other ranks may change the other bytes. */
static inline void add_to_word(uint64_t *word, uint64_t delta, uint64_t mask, uint32_t dtype) {
    if (dtype == TUTTI_I64) {
        __atomic_fetch_add(word, delta, __ATOMIC_RELAXED);
        return;
    }
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED), sum;
    do
        sum = (words_add(seen, delta, dtype) & mask) | (seen & ~mask);
    while (!__atomic_compare_exchange_n(word, &seen, sum, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

static inline void add_row(char *row, const char *values, uint64_t bytes, uint32_t dtype) {
    uint64_t *word = (uint64_t *)((uintptr_t)row & ~(uintptr_t)7);
    uint64_t before = (uintptr_t)row & 7; /* 0, or 4 when the row begins in the middle of a word */
    if (before) {
        uint32_t half;
        memcpy(&half, values, 4);
        uint32_t halves[2] = {0, half}, ones[2] = {0, ~0u};
        uint64_t delta, mask;
        memcpy(&delta, halves, 8);
        memcpy(&mask, ones, 8);
        add_to_word(word++, delta, mask, dtype);
        values += 4;
        bytes -= 4;
    }
    for (; bytes >= 8; bytes -= 8, values += 8, ++word) {
        uint64_t delta;
        memcpy(&delta, values, 8);
        add_to_word(word, delta, ~0ull, dtype);
    }
    if (bytes) {
        uint32_t half;
        memcpy(&half, values, 4);
        uint32_t halves[2] = {half, 0}, ones[2] = {~0u, 0};
        uint64_t delta, mask;
        memcpy(&delta, halves, 8);
        memcpy(&mask, ones, 8);
        add_to_word(word, delta, mask, dtype);
    }
}

#define ADD_ROWS(DTYPE)                                                                            \
    for (uint64_t i = 0; i < count; ++i, from += table->row_bytes) {                               \
        prefetch(table, indices, i, count);                                                        \
        add_row(row_at(table, (uint64_t)indices[i]), from, table->row_bytes, DTYPE);               \
    }

int64_t tutti_rows_scatter_add(const tutti_rows *table, const int64_t *indices, uint64_t count,
                               const void *values, uint32_t dtype) {
    int64_t bad = first_out_of_range(table, indices, count);
    const char *from = values;
    if (bad >= 0)
        return bad;
    switch (dtype) { /* constants, so that the compiler generates a loop for each dtype */
    case TUTTI_F32:
        ADD_ROWS(TUTTI_F32)
        break;
    case TUTTI_F64:
        ADD_ROWS(TUTTI_F64)
        break;
    case TUTTI_I32:
        ADD_ROWS(TUTTI_I32)
        break;
    case TUTTI_I64:
        ADD_ROWS(TUTTI_I64)
        break;
    default:
        return TUTTI_BAD_ARGUMENT;
    }
    return -1;
}

uint64_t tutti_cell_bytes(uint64_t payload_bytes) { return 8 + 2 * 8 * words_of(payload_bytes); }

uint64_t *tutti_rows_state(const tutti_rows *table, uint64_t index) {
    return (uint64_t *)row_at(table, index);
}

int64_t tutti_rows_lookup(tutti_rows *table, uint64_t index, void *out) {
    const uint64_t *state = tutti_rows_state(table, index);
    uint64_t version;
    int code = cell_read(state, state + 1, table->row_bytes, out, &version, &table->retries);
    __atomic_fetch_add(&table->lookups, 1, __ATOMIC_RELAXED);
    return code < 0 ? code : (int64_t)version;
}

int64_t tutti_rows_lookup_many(tutti_rows *table, const int64_t *indices, uint64_t count, void *out,
                               uint64_t *versions) {
    int64_t bad = first_out_of_range(table, indices, count);
    char *to = out;
    for (uint64_t i = 0; bad < 0 && i < count; ++i, to += table->row_bytes) {
        prefetch(table, indices, i, count);
        int64_t version;
        while ((version = tutti_rows_lookup(table, (uint64_t)indices[i], to)) < 0)
            cell_pause();
        versions[i] = (uint64_t)version;
        if (version == 0)
            memset(to, 0, table->row_bytes);
    }
    return bad;
}

int64_t tutti_rows_publish(tutti_rows *table, uint64_t index, const void *row) {
    uint64_t *state = tutti_rows_state(table, index), claimed, version;
    do {
        int code = cell_claim(state, table->rank, table->dead, &claimed);
        if (code < 0)
            return code;
        words_store(cell_next(state + 1, claimed, table->row_bytes), row, table->row_bytes);
        version = cell_publish(state, claimed, 1);
    } while (!version); /* the claim was taken over: start again (cell.h) */
    return (int64_t)version;
}

uint64_t tutti_rows_lookups(const tutti_rows *table) {
    return __atomic_load_n(&table->lookups, __ATOMIC_RELAXED);
}

uint64_t tutti_rows_retries(const tutti_rows *table) {
    return __atomic_load_n(&table->retries, __ATOMIC_RELAXED);
}

void tutti_rows_declare_dead(tutti_rows *table, uint32_t rank) {
    if (rank < table->size)
        __atomic_store_n(&table->dead[rank], 1, __ATOMIC_RELAXED);
}

/* ---- Slots: a sequence lock with one writer ----
 *
 * The sequence is odd while the owner writes. begin() makes the sequence odd and executes a release
 * fence before the words are stored. end() makes the sequence even with a release store. A reader
 * checks the sequence (acquire), copies the words (relaxed), executes an acquire fence and checks
 * the sequence again. If the copy contains a word of a later write, the two fences synchronize, so
 * the second check sees the odd sequence of that write's begin(), or a later value, and the copy is
 * refused. Readers store nothing in the slot, so a reader that dies blocks no process, and the
 * writer never waits. */

void tutti_slot_begin(uint64_t *sequence) {
    uint64_t now = __atomic_load_n(sequence, __ATOMIC_RELAXED);
    __atomic_store_n(sequence, now | 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

void tutti_slot_write(void *to, const void *from, uint64_t bytes) { words_store(to, from, bytes); }

uint64_t tutti_slot_end(uint64_t *sequence) {
    uint64_t next = (__atomic_load_n(sequence, __ATOMIC_RELAXED) | 1) + 1;
    __atomic_store_n(sequence, next, __ATOMIC_RELEASE);
    return next;
}

int tutti_slot_copy(void *to, const void *from, uint64_t bytes, const uint64_t *sequence,
                    uint64_t expected) {
    const uint64_t *source = from;
    uint64_t *target = to; /* another slot, or memory that is aligned and padded like a slot */
    if (__atomic_load_n(sequence, __ATOMIC_ACQUIRE) != expected)
        return 0;
    for (uint64_t i = 0; i < words_of(bytes); ++i)
        __atomic_store_n(target + i, __atomic_load_n(source + i, __ATOMIC_RELAXED),
                         __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(sequence, __ATOMIC_RELAXED) == expected;
}
