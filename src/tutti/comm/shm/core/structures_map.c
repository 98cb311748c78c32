/* A hash map sharded over ranks: open addressing with linear probing inside a shard.
 *
 *     shard: number of claimed entries, number of keys with a value (8 bytes each), padding to 64
 *            bytes, then the entries
 *     entry: key + 1 (0: free), then a cell (cell.h): the state, then two copies of the payload
 *
 * A key is stored by compare-and-swap from 0 and stays in its entry. So two ranks that insert the
 * same key use the same entry, and a probe may stop at the first free entry. A delete publishes a
 * version that is marked as absent. The entry stays reserved for the same key until
 * tutti_map_compact(). Loads and stores of the key may be relaxed, because accesses to the value
 * are ordered by the cell's state, which is stored with release and loaded with acquire. A cell
 * that contains only zeros was never published. */
#include <stdlib.h>
#include <string.h>

#include "cell.h"

enum { SHARD_CLAIMED = 0, SHARD_LIVE = 1, SHARD_HEADER_WORDS = 8 };
enum { PREFETCH_AHEAD = 4, CLAIM_TRIES = 64 };

struct tutti_map {
    uint64_t mask, entry_words, value_bytes, limit;
    uint32_t size, rank;
    uint64_t gets, hits, retries;
    uint8_t dead[TUTTI_MAX_RANKS];
    uint64_t *shards[];
};

static uint64_t words_per_entry(uint64_t value_bytes) { return 2 + 2 * words_of(value_bytes); }

uint64_t tutti_map_shard_bytes(uint64_t entries, uint64_t value_bytes) {
    return 8 * (SHARD_HEADER_WORDS + entries * words_per_entry(value_bytes));
}

tutti_map *tutti_map_create(void *const *shards, uint32_t size, uint32_t rank, uint64_t entries,
                            uint64_t value_bytes) {
    if (size == 0 || size > TUTTI_MAX_RANKS || rank >= size || entries == 0 ||
        (entries & (entries - 1)))
        return NULL;
    tutti_map *map = calloc(1, sizeof *map + size * sizeof *map->shards);
    if (!map)
        return NULL;
    map->mask = entries - 1;
    map->entry_words = words_per_entry(value_bytes);
    map->value_bytes = value_bytes;
    /* One eighth of the entries stays free, so that probes are short and always end. */
    map->limit = entries < 8 ? entries - 1 : entries - entries / 8;
    map->size = size;
    map->rank = rank;
    for (uint32_t r = 0; r < size; ++r)
        map->shards[r] = shards[r];
    return map;
}

void tutti_map_free(tutti_map *map) { free(map); }

/* The finalizer of splitmix64. It distributes neighbouring keys over the table. */
static inline uint64_t mix(uint64_t key) {
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ull;
    key = (key ^ (key >> 27)) * 0x94d049bb133111ebull;
    return key ^ (key >> 31);
}

/* The high half of the hash selects the rank and the low bits select the entry, so that the two
 * choices are independent. */
static inline uint32_t shard_of(const tutti_map *map, uint64_t hash) {
    return (uint32_t)(((hash >> 32) * map->size) >> 32);
}

uint32_t tutti_map_owner(const tutti_map *map, uint64_t key) { return shard_of(map, mix(key)); }

static inline uint64_t *entry_at(const tutti_map *map, uint64_t *shard, uint64_t slot) {
    return shard + SHARD_HEADER_WORDS + (slot & map->mask) * map->entry_words;
}

static uint64_t *find(const tutti_map *map, uint64_t *shard, uint64_t key, uint64_t hash) {
    for (uint64_t i = 0; i <= map->mask; ++i) {
        uint64_t *entry = entry_at(map, shard, hash + i);
        uint64_t found = __atomic_load_n(entry, __ATOMIC_RELAXED);
        if (found == 0)
            return NULL;
        if (found == key + 1)
            return entry;
    }
    return NULL;
}

/* Returns the entry of a key, or NULL if the shard is full. `claimed` is incremented before the
 * entry is taken. So for a short time, `claimed` may count ranks that then lose the race for an
 * entry. Therefore a rank that finds `claimed` at the limit searches again: another rank may have
 * inserted the key, or a rank that lost a race may have decremented `claimed`. */
static uint64_t *find_or_claim(const tutti_map *map, uint64_t *shard, uint64_t key, uint64_t hash) {
    uint64_t *claimed = shard + SHARD_CLAIMED;
    for (int attempt = 0; attempt < CLAIM_TRIES; ++attempt) {
        int full = 0;
        for (uint64_t i = 0; i <= map->mask && !full; ++i) {
            uint64_t *entry = entry_at(map, shard, hash + i);
            uint64_t found = __atomic_load_n(entry, __ATOMIC_RELAXED);
            if (found == 0) {
                if (__atomic_fetch_add(claimed, 1, __ATOMIC_RELAXED) < map->limit &&
                    __atomic_compare_exchange_n(entry, &found, key + 1, 0, __ATOMIC_RELAXED,
                                                __ATOMIC_RELAXED))
                    return entry;
                __atomic_fetch_sub(claimed, 1, __ATOMIC_RELAXED);
                full = found == 0; /* if found != 0, another rank took the entry: not full */
            }
            if (found == key + 1)
                return entry;
        }
        uint64_t *entry = find(map, shard, key, hash);
        if (entry || __atomic_load_n(claimed, __ATOMIC_RELAXED) >= map->limit)
            return entry;
        cell_pause();
    }
    return NULL;
}

int tutti_map_get(tutti_map *map, uint64_t key, void *out) {
    uint64_t hash = mix(key), version;
    uint64_t *entry = find(map, map->shards[shard_of(map, hash)], key, hash);
    __atomic_fetch_add(&map->gets, 1, __ATOMIC_RELAXED);
    if (!entry)
        return 0;
    int found = cell_read(entry + 1, entry + 2, map->value_bytes, out, &version, &map->retries);
    if (found > 0)
        __atomic_fetch_add(&map->hits, 1, __ATOMIC_RELAXED);
    return found;
}

int tutti_map_has(const tutti_map *map, uint64_t key) {
    uint64_t hash = mix(key);
    uint64_t *entry = find(map, map->shards[shard_of(map, hash)], key, hash);
    if (!entry)
        return 0;
    uint64_t state = __atomic_load_n(entry + 1, __ATOMIC_ACQUIRE);
    return cell_version(state) > 0 && !(state & CELL_ABSENT);
}

static inline void prefetch(const tutti_map *map, const uint64_t *keys, uint64_t i, uint64_t count) {
    if (i + PREFETCH_AHEAD >= count)
        return;
    uint64_t hash = mix(keys[i + PREFETCH_AHEAD]);
    __builtin_prefetch(entry_at(map, map->shards[shard_of(map, hash)], hash));
}

uint64_t tutti_map_get_many(tutti_map *map, const uint64_t *keys, uint64_t count, void *out,
                            uint8_t *found) {
    uint64_t hits = 0;
    char *to = out;
    for (uint64_t i = 0; i < count; ++i, to += map->value_bytes) {
        prefetch(map, keys, i, count);
        int code;
        while ((code = tutti_map_get(map, keys[i], to)) < 0)
            cell_pause();
        found[i] = (uint8_t)code;
        hits += (uint64_t)code;
        if (!code)
            memset(to, 0, map->value_bytes);
    }
    return hits;
}

static void write_sum(const tutti_map *map, uint64_t *payload, uint64_t claimed, const void *value,
                      uint32_t dtype) {
    int present = cell_version(claimed) > 0 && !(claimed & CELL_ABSENT);
    const uint64_t *now = cell_now(payload, claimed, map->value_bytes);
    uint64_t *next = cell_next(payload, claimed, map->value_bytes);
    for (uint64_t i = 0; i < words_of(map->value_bytes); ++i) {
        uint64_t delta = word_at(value, i, map->value_bytes);
        uint64_t old = present ? __atomic_load_n(now + i, __ATOMIC_RELAXED) : 0;
        __atomic_store_n(next + i, present ? words_add(old, delta, dtype) : delta,
                         __ATOMIC_RELAXED);
    }
}

/* Stores `value` if dtype < 0, and adds `value` to the stored value otherwise. A writer whose claim
 * was taken over starts again (cell.h). */
static int update(tutti_map *map, uint64_t key, const void *value, int32_t dtype) {
    if (key == UINT64_MAX) /* key + 1 would mean "free" */
        return TUTTI_BAD_ARGUMENT;
    uint64_t hash = mix(key), claimed;
    uint64_t *shard = map->shards[shard_of(map, hash)];
    uint64_t *entry = find_or_claim(map, shard, key, hash);
    if (!entry)
        return TUTTI_FULL;
    do {
        int code = cell_claim(entry + 1, map->rank, map->dead, &claimed);
        if (code < 0)
            return code;
        if (dtype < 0)
            words_store(cell_next(entry + 2, claimed, map->value_bytes), value, map->value_bytes);
        else
            write_sum(map, entry + 2, claimed, value, (uint32_t)dtype);
    } while (!cell_publish(entry + 1, claimed, 1));
    int fresh = cell_version(claimed) == 0 || (claimed & CELL_ABSENT);
    if (fresh)
        __atomic_fetch_add(shard + SHARD_LIVE, 1, __ATOMIC_RELAXED);
    return fresh;
}

int tutti_map_put(tutti_map *map, uint64_t key, const void *value) {
    return update(map, key, value, -1);
}

int tutti_map_add(tutti_map *map, uint64_t key, const void *value, uint32_t dtype) {
    uint64_t element = addable_bytes(dtype);
    if (!element || map->value_bytes % element)
        return TUTTI_BAD_ARGUMENT;
    return update(map, key, value, (int32_t)dtype);
}

uint64_t tutti_map_put_many(tutti_map *map, const uint64_t *keys, uint64_t count, const void *values,
                            int32_t dtype, int *code) {
    const char *from = values;
    *code = 0;
    for (uint64_t i = 0; i < count; ++i, from += map->value_bytes) {
        prefetch(map, keys, i, count);
        int served = dtype < 0 ? tutti_map_put(map, keys[i], from)
                               : tutti_map_add(map, keys[i], from, (uint32_t)dtype);
        if (served < 0) {
            *code = served;
            return i;
        }
    }
    return count;
}

int tutti_map_delete(tutti_map *map, uint64_t key) {
    uint64_t hash = mix(key), claimed;
    uint64_t *shard = map->shards[shard_of(map, hash)];
    uint64_t *entry = find(map, shard, key, hash);
    if (!entry)
        return 0;
    do {
        int code = cell_claim(entry + 1, map->rank, map->dead, &claimed);
        if (code < 0)
            return code;
    } while (!cell_publish(entry + 1, claimed, 0));
    int present = cell_version(claimed) > 0 && !(claimed & CELL_ABSENT);
    if (present)
        __atomic_fetch_sub(shard + SHARD_LIVE, 1, __ATOMIC_RELAXED);
    return present;
}

uint64_t tutti_map_live(const tutti_map *map, uint32_t rank) {
    return __atomic_load_n(map->shards[rank] + SHARD_LIVE, __ATOMIC_RELAXED);
}

uint64_t tutti_map_claimed(const tutti_map *map, uint32_t rank) {
    return __atomic_load_n(map->shards[rank] + SHARD_CLAIMED, __ATOMIC_RELAXED);
}

uint64_t tutti_map_limit(const tutti_map *map) { return map->limit; }

uint64_t tutti_map_collect(tutti_map *map, uint64_t count, uint64_t *keys, void *values) {
    uint64_t taken = 0;
    char *to = values;
    for (uint64_t slot = 0; slot <= map->mask && taken < count; ++slot) {
        uint64_t *entry = entry_at(map, map->shards[map->rank], slot), version;
        uint64_t key = __atomic_load_n(entry, __ATOMIC_RELAXED);
        int code = key ? TUTTI_OVERTAKEN : 0; /* TUTTI_OVERTAKEN makes the loop read the cell */
        while (code < 0)
            code = cell_read(entry + 1, entry + 2, map->value_bytes, to, &version, &map->retries);
        if (code) {
            keys[taken++] = key - 1;
            to += map->value_bytes;
        }
    }
    return taken;
}

/* This function counts the keys with a value, because the shard's counter may be too low if a
 * process was killed between publishing a key and counting it. With a count that is too low,
 * tutti_map_collect would omit the last keys, and they would be lost. */
int tutti_map_compact(tutti_map *map) {
    uint64_t *shard = map->shards[map->rank], entries = map->mask + 1, present = 0;
    for (uint64_t slot = 0; slot < entries; ++slot) {
        const uint64_t *entry = entry_at(map, shard, slot);
        uint64_t state = __atomic_load_n(entry + 1, __ATOMIC_ACQUIRE);
        present += cell_version(state) > 0 && !(state & CELL_ABSENT);
    }
    uint64_t *keys = malloc((present + 1) * 8);
    char *values = malloc((present + 1) * (map->value_bytes + 1));
    int code = keys && values ? 0 : TUTTI_NO_MEMORY;
    if (!code) {
        uint64_t taken = tutti_map_collect(map, present, keys, values);
        memset(shard, 0, tutti_map_shard_bytes(entries, map->value_bytes));
        for (uint64_t i = 0; i < taken && code >= 0; ++i)
            code = tutti_map_put(map, keys[i], values + i * map->value_bytes);
    }
    free(values);
    free(keys);
    return code < 0 ? code : 0;
}

uint64_t tutti_map_gets(const tutti_map *map) {
    return __atomic_load_n(&map->gets, __ATOMIC_RELAXED);
}

uint64_t tutti_map_hits(const tutti_map *map) {
    return __atomic_load_n(&map->hits, __ATOMIC_RELAXED);
}

uint64_t tutti_map_retries(const tutti_map *map) {
    return __atomic_load_n(&map->retries, __ATOMIC_RELAXED);
}

void tutti_map_declare_dead(tutti_map *map, uint32_t rank) {
    if (rank < map->size)
        __atomic_store_n(&map->dead[rank], 1, __ATOMIC_RELAXED);
}
