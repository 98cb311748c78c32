/* The part of a rank's segment that tools outside the group read: header, ledger and location.
 *
 * The layout is fixed, little-endian and free of pointers, so that any program can open
 * /proc/PID/fd/FD of a memfd named "tutti-shm:GROUP" and parse it. (The owner must not do this:
 * when a process closes any descriptor of a file, it releases its locks on the file, and peers
 * would then consider the owner dead.) An entry is valid if `id` has the same value, not 0, before
 * and after the rest of the entry is read. A location is valid if `version` has the same even value
 * before and after. Numbers at the beginning of the comments on members are byte offsets. */
#ifndef TUTTI_LEDGER_H
#define TUTTI_LEDGER_H

#include "tutti_shm.h"

#include <stdatomic.h>

#define TUTTI_LEDGER_ENTRIES 64
#define TUTTI_NAME_BYTES 128
#define TUTTI_WHERE_WORDS 12 /* 96 bytes */
#define TUTTI_LOCATION_WORDS 32 /* 256 bytes */
#define TUTTI_REASON_WORDS 512 /* 4096 bytes */

typedef struct {
    char magic[8]; /* 0: "TUTTISHM" */
    uint32_t abi;
    uint32_t entries; /* 12: capacity of the ledger */
    int32_t rank, size;
    int64_t pid;            /* 24 */
    uint64_t token;         /* 32: argument of tutti_group_create */
    uint64_t bytes;         /* 40: size of the segment */
    uint64_t ledger_offset; /* 48 */
    uint64_t entry_bytes;   /* 56 */
    uint64_t location_offset;  /* 64 */
    int64_t created_ns;     /* 72: CLOCK_REALTIME */
    char name[TUTTI_NAME_BYTES]; /* 80 */
} tutti_header;

enum tutti_state { TUTTI_QUEUED, TUTTI_RUNNING, TUTTI_DONE, TUTTI_FAILED };

typedef struct {
    _Atomic uint64_t id;       /* 0: counts from 1; index (id - 1) % entries; 0 during a write */
    _Atomic uint64_t sequence; /* 8: counts a group's collectives, or this rank's sends and recvs */
    _Atomic uint32_t kind, dtype, reduce; /* 16, 20, 24: as in tutti_shm.h */
    _Atomic int32_t root;      /* 28: root rank, or the peer of a send or recv */
    _Atomic uint32_t tag;      /* 32 */
    _Atomic uint32_t state;    /* 36: enum tutti_state */
    _Atomic uint64_t bytes;    /* 40 */
    _Atomic uint64_t begun_ns; /* 48: CLOCK_MONOTONIC at the call */
    _Atomic uint64_t begun_realtime_ns; /* 56 */
    _Atomic uint64_t ended_ns; /* 64: CLOCK_MONOTONIC; 0 until done or failed */
    _Atomic uint64_t fingerprint; /* 72: hash of the arguments that all ranks share */
    _Atomic uint64_t reserved[2];
    _Atomic uint64_t where[TUTTI_WHERE_WORDS]; /* 96: source location of the caller */
} tutti_entry;                                 /* 192 bytes */

/* The source location of the process's main thread, as last sampled. */
typedef struct {
    _Atomic uint64_t version; /* odd while the location is written */
    _Atomic uint64_t seen_ns; /* CLOCK_MONOTONIC */
    _Atomic uint64_t text[TUTTI_LOCATION_WORDS];
} tutti_location;

#endif
