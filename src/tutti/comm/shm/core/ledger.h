/* What lies in a rank's segment for others to read: who it is, what it did last, where it is.
 *
 * The layout is fixed, little-endian and free of pointers, so that a program outside the group can
 * open /proc/PID/fd/FD of a memfd named "tutti-shm:GROUP" and parse it. (Not from inside the owning
 * process: closing any descriptor of the file there would drop the lock by which peers see that
 * the owner lives.) A reader takes an entry as valid when `id` is the same, and not 0, before and
 * after it has read the rest; a place, when `version` is even and the same before and after. */
#ifndef TUTTI_LEDGER_H
#define TUTTI_LEDGER_H

#include "tutti_shm.h"

#include <stdatomic.h>

#define TUTTI_LEDGER_ENTRIES 64
#define TUTTI_NAME_BYTES 128
#define TUTTI_WHERE_WORDS 12 /* 96 bytes */
#define TUTTI_PLACE_WORDS 32 /* 256 bytes */
#define TUTTI_REASON_WORDS 512 /* 4096 bytes */

typedef struct {
    char magic[8]; /* 0: "TUTTISHM" */
    uint32_t abi;
    uint32_t entries; /* 12: how many the ledger holds */
    int32_t rank, size;
    int64_t pid;            /* 24 */
    uint64_t token;         /* 32 */
    uint64_t bytes;         /* 40: of the whole segment */
    uint64_t ledger_offset; /* 48 */
    uint64_t entry_bytes;   /* 56 */
    uint64_t place_offset;  /* 64 */
    int64_t created_ns;     /* 72: CLOCK_REALTIME */
    char name[TUTTI_NAME_BYTES]; /* 80 */
} tutti_header;

enum tutti_state { TUTTI_QUEUED, TUTTI_RUNNING, TUTTI_DONE, TUTTI_FAILED };

typedef struct {
    _Atomic uint64_t id;       /* 0: from 1, at (id - 1) % entries; 0 while it is being written */
    _Atomic uint64_t sequence; /* 8: the n-th collective of the group, or message of this rank */
    _Atomic uint32_t kind, dtype, reduce; /* 16, 20, 24: as in tutti_shm.h */
    _Atomic int32_t root;      /* 28: or the peer of a message */
    _Atomic uint32_t tag;      /* 32 */
    _Atomic uint32_t state;    /* 36: enum tutti_state */
    _Atomic uint64_t bytes;    /* 40 */
    _Atomic uint64_t begun_ns; /* 48: CLOCK_MONOTONIC, when it was called */
    _Atomic uint64_t begun_realtime_ns; /* 56 */
    _Atomic uint64_t ended_ns; /* 64: CLOCK_MONOTONIC, 0 until done or failed */
    _Atomic uint64_t print;    /* 72: what must be alike on all ranks, as one number */
    _Atomic uint64_t reserved[2];
    _Atomic uint64_t where[TUTTI_WHERE_WORDS]; /* 96: text of the caller's place */
} tutti_entry;                                 /* 192 bytes */

typedef struct {
    _Atomic uint64_t version; /* odd while it is being written */
    _Atomic uint64_t seen_ns; /* CLOCK_MONOTONIC */
    _Atomic uint64_t text[TUTTI_PLACE_WORDS];
} tutti_place;

#endif
