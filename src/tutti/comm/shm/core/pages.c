/* Memory that a segment can have: how much there is, and how it is mapped. */
#define _GNU_SOURCE /* MAP_POPULATE */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif

enum { LARGE_PAGE = 2 << 20, ASKED_AT_ONCE = 16 * LARGE_PAGE };
#define MOST_NS_FOR_LARGE_PAGES 500000000u /* of the first; a tenth for the others */

/* The number that follows a word in a file, or its first number; UINT64_MAX where there is none. */
static uint64_t number_in(const char *path, const char *word)
{
    FILE *file = fopen(path, "re");
    char line[256];
    uint64_t number = UINT64_MAX;
    size_t length = strlen(word);
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, word, length) == 0 && sscanf(line + length, "%" SCNu64, &number) == 1)
            break;
    if (file)
        fclose(file);
    return number;
}

/* Control groups limit the memory of a container; both generations are in use. */
typedef struct {
    const char *root, *limit, *usage, *cached[2];
} controller;

static const controller generations[] = {
    {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     {"total_inactive_file ", "total_active_file "}},
    {"/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file ", "active_file "}},
};

static uint64_t read_at(const controller *c, const char *path, const char *name, const char *word)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s/%s", c->root, path, name);
    return number_in(full, word);
}

/* What this group and all above it leave. What they hold of files is given up when it is needed. A
 * container may see its own group as the root, under another path than it is told: so all parents
 * are looked at, whether they exist or not. */
static uint64_t left_in_group(const controller *c, char *path)
{
    uint64_t least_left = UINT64_MAX;
    for (;;) {
        uint64_t limit = read_at(c, path, c->limit, ""), used = read_at(c, path, c->usage, "");
        if (limit != UINT64_MAX && used != UINT64_MAX) {
            for (int i = 0; i < 2; i++) {
                uint64_t cached = read_at(c, path, "memory.stat", c->cached[i]);
                used -= cached < used ? cached : 0;
            }
            uint64_t left = limit > used ? limit - used : 0;
            least_left = left < least_left ? left : least_left;
        }
        char *last = strrchr(path, '/');
        if (!last)
            return least_left;
        *last = 0;
    }
}

uint64_t available_memory(const char **where)
{
    uint64_t kib = number_in("/proc/meminfo", "MemAvailable:");
    uint64_t available = kib == UINT64_MAX ? UINT64_MAX : kib * 1024;
    *where = "this host";
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[512];
    while (file && fgets(line, sizeof line, file)) { /* number:controllers:path */
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : 0;
        if (!path)
            continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        bool second = controllers[1] == 0;
        if (!second && !strstr(controllers, "memory"))
            continue;
        uint64_t left = left_in_group(&generations[second], path);
        if (left < available) {
            available = left;
            *where = "this container (its control group)";
        }
    }
    if (file)
        fclose(file);
    return available;
}

/* Large pages need one lookup for 2 MiB, not 512. Shared memory gets them if it is asked for, and
 * only at an address that is a multiple of their size: hence the wider reservation, of which only
 * the segment stays. A kernel that has no such page to give, or does not know the words (Linux 6.1),
 * leaves small ones; one that must first move other pages takes its time, and is not asked for ever.
 *
 * The pages are there already: entering them now keeps faults out of the first operations. */
void *map_pages(int fd, uint64_t bytes, bool first)
{
    const int rights = PROT_READ | PROT_WRITE;
    if (bytes < LARGE_PAGE)
        return mmap(NULL, bytes, rights, MAP_SHARED | MAP_POPULATE, fd, 0);
    uint64_t reserved = bytes + LARGE_PAGE;
    unsigned char *from =
        mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (from == MAP_FAILED)
        return MAP_FAILED;
    unsigned char *base = from + (-(uintptr_t)from & (LARGE_PAGE - 1));
    if (mmap(base, bytes, rights, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(from, reserved);
        return MAP_FAILED;
    }
    uint64_t small = (uint64_t)sysconf(_SC_PAGESIZE);
    unsigned char *end = base + (bytes + small - 1) / small * small;
    if (base > from)
        munmap(from, (size_t)(base - from));
    if (from + reserved > end)
        munmap(end, (size_t)(from + reserved - end));
    uint64_t large = bytes / LARGE_PAGE * LARGE_PAGE, begun = now_ns();
    uint64_t most = first ? MOST_NS_FOR_LARGE_PAGES : MOST_NS_FOR_LARGE_PAGES / 10;
    for (uint64_t at = 0; at < large && now_ns() - begun < most; at += ASKED_AT_ONCE)
        madvise(base + at, large - at < ASKED_AT_ONCE ? large - at : ASKED_AT_ONCE, MADV_COLLAPSE);
    if (madvise(base, bytes, MADV_POPULATE_WRITE) < 0)
        for (uint64_t at = 0; at < bytes; at += small)
            (void)*(const volatile unsigned char *)(base + at);
    return base;
}
