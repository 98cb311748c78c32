/* Data structures in memory that several processes have mapped: rows sharded over ranks, versioned
 * rows, a hash map, and slots that are copied while they may change. The functions only take
 * addresses: the caller maps the memory and detects which peers have died.
 *
 * The functions wait for another process for at most a few hundred spins and then return
 * TUTTI_BUSY or TUTTI_OVERTAKEN, so that they may be called with the GIL held. Exceptions are
 * tutti_await_word, which waits up to its timeout, and tutti_rows_lookup_many, tutti_map_get_many
 * and tutti_map_collect, which retry without limit when writers overtake them. */
#ifndef TUTTI_STRUCTURES_H
#define TUTTI_STRUCTURES_H

#include <stdint.h>

#pragma GCC visibility push(default)

enum {
    TUTTI_FULL = -100,      /* a shard of the map has no free entry */
    TUTTI_OVERTAKEN = -101, /* writers changed the value faster than it could be copied */
    TUTTI_BUSY = -1000      /* The code TUTTI_BUSY - r means that rank r is writing. Retry; if rank r
                             * has died, declare it dead first. */
};

/* ---- Rows sharded over ranks. `bases[r]` is the address of rank r's shard in this process,
 * aligned to 8 bytes. The rows of a shard are `stride` bytes apart. Block placement (cyclic is 0):
 * rank r has `per_rank` rows from row r * per_rank, where per_rank is rows / size, rounded up.
 * Cyclic placement: row i is on rank i % size. ---- */
typedef struct tutti_rows tutti_rows;
tutti_rows *tutti_rows_create(void *const *bases, uint32_t size, uint32_t rank, uint64_t rows,
                              uint64_t row_bytes, uint64_t stride, uint32_t cyclic);
void tutti_rows_free(tutti_rows *);

/* These functions return -1 on success. If an index is out of range, they return the position of
 * the first such index and change nothing. tutti_rows_scatter_add adds every element atomically.
 * Its dtype is a tutti_dtype (F32, F64, I32 or I64). */
int64_t tutti_rows_gather(const tutti_rows *, const int64_t *indices, uint64_t count, void *out);
int64_t tutti_rows_scatter(const tutti_rows *, const int64_t *indices, uint64_t count,
                           const void *values);
int64_t tutti_rows_scatter_add(const tutti_rows *, const int64_t *indices, uint64_t count,
                               const void *values, uint32_t dtype);

/* ---- Versioned rows: a row is a cell (cell.h) instead of plain bytes, and `stride` is at least
 * tutti_cell_bytes(row_bytes). The index must be in range. ---- */
uint64_t tutti_cell_bytes(uint64_t payload_bytes);
/* Returns the version that was copied (0: never published), or TUTTI_OVERTAKEN. */
int64_t tutti_rows_lookup(tutti_rows *, uint64_t index, void *out);
/* Like tutti_rows_gather, but also stores the version of each row in versions[]. A row that was
 * never published reads as zeros. A row that writers overtake is retried without limit, so call
 * this function without the GIL. */
int64_t tutti_rows_lookup_many(tutti_rows *, const int64_t *indices, uint64_t count, void *out,
                               uint64_t *versions);
/* Returns the new version, or TUTTI_BUSY - rank. */
int64_t tutti_rows_publish(tutti_rows *, uint64_t index, const void *row);
uint64_t *tutti_rows_state(const tutti_rows *, uint64_t index); /* version << TUTTI_VERSION_SHIFT */
uint64_t tutti_rows_lookups(const tutti_rows *); /* number of lookups through this handle */
uint64_t tutti_rows_retries(const tutti_rows *); /* number of copies that were repeated */
/* From now on ignores the claims of a rank whose process has died. Never call this function for a
 * live process, not even if it has left the group, because it may still be writing (cell.h). */
void tutti_rows_declare_dead(tutti_rows *, uint32_t rank);

/* ---- A hash map of uint64 keys (all but 2^64 - 1), sharded over ranks. Every rank's shard is
 * tutti_map_shard_bytes() of zeroed memory, aligned to 64. `entries` per shard is a
 * power of 2. ---- */
typedef struct tutti_map tutti_map;
uint64_t tutti_map_shard_bytes(uint64_t entries, uint64_t value_bytes);
tutti_map *tutti_map_create(void *const *shards, uint32_t size, uint32_t rank, uint64_t entries,
                            uint64_t value_bytes);
void tutti_map_free(tutti_map *);
uint32_t tutti_map_owner(const tutti_map *, uint64_t key);
/* Returns 1 if the key was found, 0 if it is absent, or TUTTI_OVERTAKEN. */
int tutti_map_get(tutti_map *, uint64_t key, void *out);
int tutti_map_has(const tutti_map *, uint64_t key);
/* Returns the number of keys found. found[i] is 1 if keys[i] was found. Otherwise found[i] is 0,
 * and the value is zeros. A value that writers overtake is retried without limit, so call this
 * function without the GIL. */
uint64_t tutti_map_get_many(tutti_map *, const uint64_t *keys, uint64_t count, void *out,
                            uint8_t *found);
/* Returns 1 for a new key, 0 for a replaced value, or an error: TUTTI_FULL, TUTTI_BUSY - rank, or
 * TUTTI_BAD_ARGUMENT (key 2^64 - 1). */
int tutti_map_put(tutti_map *, uint64_t key, const void *value);
/* Like tutti_map_put, but adds `value` element by element to the stored value, or to zeros if there
 * is none. dtype is as in tutti_rows_scatter_add. */
int tutti_map_add(tutti_map *, uint64_t key, const void *value, uint32_t dtype);
/* Returns 1 if the key was deleted, 0 if it was absent, or TUTTI_BUSY - rank. The entry stays
 * reserved for the same key. */
int tutti_map_delete(tutti_map *, uint64_t key);
/* Stores the values if dtype < 0, and adds them otherwise. Returns the number of keys written. If
 * this number is less than `count`, *code is the error. Otherwise *code is 0. */
uint64_t tutti_map_put_many(tutti_map *, const uint64_t *keys, uint64_t count, const void *values,
                            int32_t dtype, int *code);
/* Counters of a shard: keys that have a value, and claimed entries (deleted keys included). A
 * process that is killed between a change and the update of the counter leaves the counter off by
 * one. tutti_map_compact counts again. */
uint64_t tutti_map_live(const tutti_map *, uint32_t rank);
uint64_t tutti_map_claimed(const tutti_map *, uint32_t rank);
uint64_t tutti_map_limit(const tutti_map *); /* entries of a shard that may be claimed */
/* Copies up to `count` keys and values of this rank's own shard, and returns the number copied. */
uint64_t tutti_map_collect(tutti_map *, uint64_t count, uint64_t *keys, void *values);
/* Frees the entries of deleted keys in this rank's own shard. No rank may use the map during the
 * call. */
int tutti_map_compact(tutti_map *);
uint64_t tutti_map_gets(const tutti_map *); /* number of gets through this handle */
uint64_t tutti_map_hits(const tutti_map *); /* number of gets that found the key */
uint64_t tutti_map_retries(const tutti_map *); /* number of copies that were repeated */
void tutti_map_declare_dead(tutti_map *, uint32_t rank); /* as tutti_rows_declare_dead */

/* ---- A slot: memory with one writer and a sequence number. The sequence number is odd while the
 * slot is being written. ---- */
void tutti_slot_begin(uint64_t *sequence);
void tutti_slot_write(void *to, const void *from, uint64_t bytes); /* between begin and end */
uint64_t tutti_slot_end(uint64_t *sequence);
/* Copies a slot that its writer may change at any time. Returns 1 if the copy is the slot's content
 * at sequence `expected`. Otherwise returns 0, and the content of `to` is undefined. `to` and
 * `from` are aligned to 8 bytes and padded to whole words. */
int tutti_slot_copy(void *to, const void *from, uint64_t bytes, const uint64_t *sequence,
                    uint64_t expected);

/* Waits until a word is at least `at_least`, for at most `timeout_s` seconds, and returns the word
 * (acquire). */
uint64_t tutti_await_word(const uint64_t *word, uint64_t at_least, double timeout_s);

#define TUTTI_VERSION_SHIFT 16

#pragma GCC visibility pop

#endif
