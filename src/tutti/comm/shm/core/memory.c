/* Limits of memory and CPUs, read from /proc and the control groups, and the mapping of shared
 * memory. */
#define _GNU_SOURCE /* MAP_POPULATE */
#include "internal.h"

#include <inttypes.h>
#include <math.h>
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

enum { HUGE_PAGE = 2 << 20, COLLAPSE_AT_ONCE = 16 * HUGE_PAGE };
#define COLLAPSE_NS 500000000u /* time limit for huge pages in the creator; peers: a tenth of it */

/* Returns the number that follows `word` at the start of a line of a file, or UINT64_MAX if there
 * is no such number. */
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

/* Control groups, version 1 (one hierarchy per controller) and version 2 (one for all
 * controllers). */
enum { CGROUP_V1, CGROUP_V2 };
typedef struct {
    const char *controller; /* the name in /proc/self/cgroup */
    const char *roots[2];   /* mount points of version 1 and version 2 */
} controller;

static const controller MEMORY = {"memory", {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"}};
static const controller CPU = {"cpu", {"/sys/fs/cgroup/cpu", "/sys/fs/cgroup"}};

static void file_of(char *full, size_t room, const char *root, const char *path, const char *name)
{
    snprintf(full, room, "%s%s/%s", root, path, name);
}

/* Calls `limit_at` for the process's control group and all groups above it, and returns the lowest
 * limit. Inside a container, the process's group may be mounted as the root, although /proc
 * contains a longer path. Therefore groups that do not exist are skipped. */
static double lowest_limit(const controller *c, double (*limit_at)(int version, const char *root,
                                                                  const char *path))
{
    double least = HUGE_VAL;
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[512];
    while (file && fgets(line, sizeof line, file)) { /* number:controllers:path */
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        int version = names[1] == 0 ? CGROUP_V2 : CGROUP_V1;
        bool ours = version == CGROUP_V2;
        char *rest = NULL;
        for (char *name = strtok_r(names + 1, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
            ours |= strcmp(name, c->controller) == 0;
        while (ours) {
            double limit = limit_at(version, c->roots[version], path);
            least = limit < least ? limit : least;
            char *last = strrchr(path, '/');
            if (!last)
                break;
            *last = 0;
        }
    }
    if (file)
        fclose(file);
    return least;
}

/* Returns the bytes that a control group may still use. The group's page cache counts as free,
 * because the kernel drops it on demand. */
static double free_memory(int version, const char *root, const char *path)
{
    static const char *const limits[] = {"memory.limit_in_bytes", "memory.max"};
    static const char *const usages[] = {"memory.usage_in_bytes", "memory.current"};
    static const char *const cached[][2] = {{"total_inactive_file ", "total_active_file "},
                                            {"inactive_file ", "active_file "}};
    char name[512];
    file_of(name, sizeof name, root, path, limits[version]);
    uint64_t limit = number_in(name, "");
    file_of(name, sizeof name, root, path, usages[version]);
    uint64_t used = number_in(name, "");
    if (limit == UINT64_MAX || used == UINT64_MAX)
        return HUGE_VAL;
    file_of(name, sizeof name, root, path, "memory.stat");
    for (int i = 0; i < 2; i++) {
        uint64_t bytes = number_in(name, cached[version][i]);
        used -= bytes < used ? bytes : 0;
    }
    return limit > used ? (double)(limit - used) : 0;
}

/* Returns the CPUs that a control group may use on average: quota divided by period. */
static double cpu_quota(int version, const char *root, const char *path)
{
    char name[512], line[64] = "";
    int64_t quota = -1;
    uint64_t period = 0;
    file_of(name, sizeof name, root, path, version == CGROUP_V2 ? "cpu.max" : "cpu.cfs_quota_us");
    FILE *file = fopen(name, "re");
    if (!file)
        return HUGE_VAL;
    if (!fgets(line, sizeof line, file))
        line[0] = 0;
    fclose(file);
    if (version == CGROUP_V2) { /* "200000 100000", or "max 100000" */
        if (sscanf(line, "%" SCNd64 " %" SCNu64, &quota, &period) != 2)
            return HUGE_VAL;
    } else { /* -1 means no limit */
        sscanf(line, "%" SCNd64, &quota);
        file_of(name, sizeof name, root, path, "cpu.cfs_period_us");
        period = number_in(name, "");
    }
    if (quota <= 0 || period == 0 || period == UINT64_MAX)
        return HUGE_VAL;
    return (double)quota / (double)period;
}

double cgroup_cpu_quota(void)
{
    return lowest_limit(&CPU, cpu_quota);
}

uint64_t available_memory(const char **where)
{
    uint64_t kib = number_in("/proc/meminfo", "MemAvailable:");
    uint64_t available = kib == UINT64_MAX ? UINT64_MAX : kib * 1024;
    double free_in_cgroup = lowest_limit(&MEMORY, free_memory);
    *where = "this host";
    if (free_in_cgroup < (double)available) {
        available = (uint64_t)free_in_cgroup;
        *where = "this container (its control group)";
    }
    return available;
}

/* A huge page of 2 MiB needs one TLB entry, while small pages need 512. Shared memory gets huge
 * pages on request (MADV_COLLAPSE), and only at addresses that are multiples of their size.
 * Therefore the reserved address range is one huge page longer than the segment, and the part of
 * the range outside the segment is unmapped again. If the kernel is older than 6.1 or has no free
 * huge page, it keeps small pages. If the kernel must first move pages, the request is slow, so it
 * has a time limit.
 *
 * The pages of the segment are already allocated. Filling the page tables here avoids page faults
 * in the first operations. */
void *map_pages(int fd, uint64_t bytes, bool creator)
{
    const int rights = PROT_READ | PROT_WRITE;
    if (bytes < HUGE_PAGE)
        return mmap(NULL, bytes, rights, MAP_SHARED | MAP_POPULATE, fd, 0);
    uint64_t reserved = bytes + HUGE_PAGE;
    unsigned char *from =
        mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (from == MAP_FAILED)
        return MAP_FAILED;
    unsigned char *base = from + (-(uintptr_t)from & (HUGE_PAGE - 1));
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
    uint64_t huge = bytes / HUGE_PAGE * HUGE_PAGE, begun = now_ns();
    uint64_t most = creator ? COLLAPSE_NS : COLLAPSE_NS / 10;
    for (uint64_t at = 0; at < huge && now_ns() - begun < most; at += COLLAPSE_AT_ONCE)
        madvise(base + at, huge - at < COLLAPSE_AT_ONCE ? huge - at : COLLAPSE_AT_ONCE,
                MADV_COLLAPSE);
    if (madvise(base, bytes, MADV_POPULATE_WRITE) < 0)
        for (uint64_t at = 0; at < bytes; at += small)
            (void)*(const volatile unsigned char *)(base + at);
    return base;
}
