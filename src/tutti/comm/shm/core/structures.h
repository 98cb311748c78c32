/* Data structures in memory that several processes have mapped: rows sharded over ranks, versioned rows,
 * a hash map, and slots that are copied while they may change. They only know addresses; mapping the
 * memory and finding out which peers have died is up to the caller.
 *
 * No function waits for another process longer than a few hundred spins; it returns TUTTI_BUSY instead,
 * so that it may be called while an interpreter's lock is held. */
#ifndef TUTTI_STRUCTURES_H
#define TUTTI_STRUCTURES_H

#include <stdint.h>

#pragma GCC visibility push(default)

enum {
    TUTTI_FULL = -100,      /* a shard of the map has no entry left */
    TUTTI_OVERTAKEN = -101, /* writers changed the value faster than it could be copied */
    TUTTI_BUSY = -1000      /* TUTTI_BUSY - r: rank r is writing; retry, or declare it dead if it died */
};

/* ---- Rows sharded over ranks. `bases[r]` is the address of rank r's shard in this process, aligned to
 * 8: rows that lie `stride` bytes apart. Block placement: rank r has rows r * per_rank, ...; cyclic: row
 * i is on rank i % size. ---- */
typedef struct tutti_rows tutti_rows;
tutti_rows *tutti_rows_create(void *const *bases, uint32_t size, uint32_t rank, uint64_t rows,
                              uint64_t row_bytes, uint64_t stride, uint32_t cyclic);
void tutti_rows_free(tutti_rows *);

/* Each returns -1, or the position of the first index that is out of range; then nothing was changed.
 * scatter_add adds every element atomically; dtype is a tutti_dtype (F32, F64, I32, I64). */
int64_t tutti_rows_gather(const tutti_rows *, const int64_t *indices, uint64_t count, void *out);
int64_t tutti_rows_scatter(const tutti_rows *, const int64_t *indices, uint64_t count,
                           const void *values);
int64_t tutti_rows_scatter_add(const tutti_rows *, const int64_t *indices, uint64_t count,
                               const void *values, uint32_t dtype);

/* ---- Versioned rows: a row is a cell (cell.h) instead of plain bytes, and row i at stride
 * tutti_cell_bytes(row_bytes) or more. The index must be in range. ---- */
uint64_t tutti_cell_bytes(uint64_t payload_bytes);
/* The version that was copied (0: never published), TUTTI_OVERTAKEN. */
int64_t tutti_rows_lookup(tutti_rows *, uint64_t index, void *out);
/* As gather, with the version of each row in versions[]. A row that was never published reads as zeros.
 * A row that writers overtake is retried without limit, so call this without an interpreter's lock. */
int64_t tutti_rows_lookup_many(tutti_rows *, const int64_t *indices, uint64_t count, void *out,
                               uint64_t *versions);
/* The new version, or TUTTI_BUSY - rank. */
int64_t tutti_rows_publish(tutti_rows *, uint64_t index, const void *row);
uint64_t *tutti_rows_state(const tutti_rows *, uint64_t index); /* version << TUTTI_VERSION_SHIFT */
uint64_t tutti_rows_lookups(const tutti_rows *); /* counters of this handle: lookups, retried copies */
uint64_t tutti_rows_retries(const tutti_rows *);
/* Ignores the claims of a rank whose process has died. Never call it for a live process, not even one
 * that has left the group: it may still be writing (cell.h). */
void tutti_rows_declare_dead(tutti_rows *, uint32_t rank);

/* ---- A hash map of uint64 keys (all but 2^64 - 1), sharded over ranks. Every rank's shard is
 * tutti_map_shard_bytes() of zeroed memory, aligned to 64. `entries` per shard is a power of 2. ---- */
typedef struct tutti_map tutti_map;
uint64_t tutti_map_shard_bytes(uint64_t entries, uint64_t value_bytes);
tutti_map *tutti_map_create(void *const *shards, uint32_t size, uint32_t rank, uint64_t entries,
                            uint64_t value_bytes);
void tutti_map_free(tutti_map *);
uint32_t tutti_map_owner(const tutti_map *, uint64_t key);
/* 1 found, 0 absent, TUTTI_OVERTAKEN. */
int tutti_map_get(tutti_map *, uint64_t key, void *out);
int tutti_map_has(const tutti_map *, uint64_t key);
/* Returns how many keys were found; found[] says which. The values of the others are zeroed. */
uint64_t tutti_map_get_many(tutti_map *, const uint64_t *keys, uint64_t count, void *out,
                            uint8_t *found);
/* 1 a new key, 0 replaced, TUTTI_FULL, TUTTI_BUSY - rank, TUTTI_BAD_ARGUMENT (key 2^64 - 1). */
int tutti_map_put(tutti_map *, uint64_t key, const void *value);
/* As put, but adds element by element to the present value, or to zeros. dtype as in scatter_add. */
int tutti_map_add(tutti_map *, uint64_t key, const void *value, uint32_t dtype);
/* 1 deleted, 0 was not there, TUTTI_BUSY - rank. The entry stays reserved for the same key. */
int tutti_map_delete(tutti_map *, uint64_t key);
/* Returns how many keys were written before the error *code, if not 0. dtype < 0: put, else add. */
uint64_t tutti_map_put_many(tutti_map *, const uint64_t *keys, uint64_t count, const void *values,
                            int32_t dtype, int *code);
/* Counters of a shard: keys that have a value, and claimed entries (deleted keys included). A process that
 * is killed between a change and the counting of it leaves a counter off by one; compaction recounts. */
uint64_t tutti_map_live(const tutti_map *, uint32_t rank);
uint64_t tutti_map_claimed(const tutti_map *, uint32_t rank);
uint64_t tutti_map_limit(const tutti_map *); /* entries of a shard that may be claimed */
/* Copies up to `count` pairs of this rank's own shard; returns how many. */
uint64_t tutti_map_collect(tutti_map *, uint64_t count, uint64_t *keys, void *values);
/* Frees the entries of deleted keys in this rank's own shard. No rank may use the map meanwhile. */
int tutti_map_compact(tutti_map *);
uint64_t tutti_map_gets(const tutti_map *); /* counters of this handle: gets, found keys, retries */
uint64_t tutti_map_hits(const tutti_map *);
uint64_t tutti_map_retries(const tutti_map *);
void tutti_map_declare_dead(tutti_map *, uint32_t rank); /* as tutti_rows_declare_dead */

/* ---- A slot: memory with one writer and a sequence number that is odd while it is written. ---- */
void tutti_slot_begin(uint64_t *sequence);
void tutti_slot_write(void *to, const void *from, uint64_t bytes); /* between begin and end */
uint64_t tutti_slot_end(uint64_t *sequence);
/* Copies a slot that its writer may change at any time: 1 if the copy is the slot's content at sequence
 * `expected`, else 0 and the content of `to` is undefined. `to` and `from` are aligned to 8 and padded
 * to whole words. */
int tutti_slot_copy(void *to, const void *from, uint64_t bytes, const uint64_t *sequence,
                    uint64_t expected);

/* Waits at most `timeout_s` until a word is `at_least`, and returns the word (acquire). */
uint64_t tutti_await_word(const uint64_t *word, uint64_t at_least, double timeout_s);

#define TUTTI_VERSION_SHIFT 16

#pragma GCC visibility pop

#endif
