/* Segments: a memfd that its creator maps and locks, and that peers open through /proc/PID/fd/FD.
 *
 * The lock is a POSIX record lock. The kernel releases it when the process ends for any reason, and
 * forked children do not inherit it. So a held lock shows that the creator is alive. Forked
 * children (such as data loaders) that live longer than the creator do not hold the lock. */
#define _GNU_SOURCE /* fallocate */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 1U
#endif

/* A process maps a segment once, even if several of its threads are ranks (as in the stress tests).
 * So each byte has one address per process, as race detectors require. */
struct tutti_segment {
    unsigned char *base;
    uint64_t bytes;
    int fd;
    int64_t owner;
    int references;
    struct tutti_segment *next;
};

static pthread_mutex_t created_lock = PTHREAD_MUTEX_INITIALIZER;
static tutti_segment *created;

void reset_segment_lock(void)
{
    pthread_mutex_init(&created_lock, NULL);
}

static struct flock owner_lock(void)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
}

static int reserve(int fd, uint64_t bytes, const char *label)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        bytes > limit.rlim_cur) /* the kernel would send SIGXFSZ */
        return fail(TUTTI_NO_MEMORY,
                    "shared memory for %s needs %" PRIu64 " bytes, but the limit on the size of a "
                    "file (ulimit -f) is %" PRIu64 " bytes. Raise the limit.",
                    label, bytes, (uint64_t)limit.rlim_cur);
    const char *where;
    uint64_t available = available_memory(&where);
    if (bytes > available) /* fallocate would succeed, and the OOM killer would act later */
        return fail(TUTTI_NO_MEMORY,
                    "shared memory for %s needs %" PRIu64 " bytes, but %s has only %" PRIu64
                    " bytes available. Use less memory or fewer ranks.",
                    label, bytes, where, available);
    int result;
    do
        result = fallocate(fd, 0, 0, (off_t)bytes);
    while (result < 0 && errno == EINTR);
    if (result == 0)
        return 0;
    if (errno == ENOSPC || errno == ENOMEM || errno == EFBIG || errno == EDQUOT)
        return fail(TUTTI_NO_MEMORY,
                    "shared memory for %s needs %" PRIu64 " bytes, but the kernel reports: %s "
                    "(%" PRIu64 " bytes are available)",
                    label, bytes, strerror(errno), available);
    return fail_errno("fallocate of shared memory");
}

static tutti_segment *map(int fd, uint64_t bytes, int64_t owner)
{
    tutti_segment *segment = calloc(1, sizeof *segment);
    if (!segment) {
        fail(TUTTI_NO_MEMORY, "there is no memory for the %zu bytes that describe a segment",
             sizeof *segment);
        return NULL;
    }
    void *base = map_pages(fd, bytes, owner == getpid());
    if (base == MAP_FAILED) {
        fail(errno == ENOMEM ? TUTTI_NO_MEMORY : TUTTI_SYSTEM,
             "cannot map %" PRIu64 " bytes of shared memory: %s", bytes, strerror(errno));
        free(segment);
        return NULL;
    }
    *segment = (tutti_segment){base, bytes, fd, owner, 1, NULL};
    return segment;
}

TUTTI_API tutti_segment *tutti_segment_create(const char *label, uint64_t bytes)
{
    char name[200];
    snprintf(name, sizeof name, "tutti-shm:%s", label ? label : "");
    if (bytes == 0 || bytes > INT64_MAX) {
        fail(TUTTI_BAD_ARGUMENT, "a segment cannot have %" PRIu64 " bytes", bytes);
        return NULL;
    }
    int fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC);
    if (fd < 0) {
        fail_errno("memfd_create");
        return NULL;
    }
    struct flock lock = owner_lock();
    tutti_segment *segment = NULL;
    if (reserve(fd, bytes, label ? label : "a segment") == 0) {
        if (fcntl(fd, F_SETLK, &lock) < 0)
            fail_errno("fcntl(F_SETLK) on shared memory");
        else
            segment = map(fd, bytes, getpid());
    }
    if (!segment) {
        close(fd);
        return NULL;
    }
    pthread_mutex_lock(&created_lock);
    segment->next = created;
    created = segment;
    pthread_mutex_unlock(&created_lock);
    return segment;
}

static tutti_segment *share_own(int fd)
{
    pthread_mutex_lock(&created_lock);
    tutti_segment *segment = created;
    while (segment && segment->fd != fd)
        segment = segment->next;
    if (segment)
        segment->references++;
    pthread_mutex_unlock(&created_lock);
    if (!segment)
        fail(TUTTI_BAD_ARGUMENT, "descriptor %d of this process is not a segment", fd);
    return segment;
}

TUTTI_API tutti_segment *tutti_segment_open(int64_t pid, int fd, uint64_t bytes)
{
    if (pid == getpid())
        return share_own(fd);
    char path[64];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/fd/%d", pid, fd);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0) {
        fail(TUTTI_SYSTEM, "cannot open %s (%s). All ranks must run on one host, as one user.", path,
             strerror(errno));
        return NULL;
    }
    struct stat status;
    struct flock lock = owner_lock();
    tutti_segment *segment = NULL;
    if (fstat(opened, &status) < 0 || fcntl(opened, F_GETLK, &lock) < 0)
        fail_errno(path);
    else if (lock.l_type == F_UNLCK || (bytes && (uint64_t)status.st_size != bytes))
        fail(TUTTI_SYSTEM,
             "%s holds %" PRId64 " bytes and is %s, so it is not a segment of %" PRIu64
             " bytes. All ranks must run on one host.",
             path, (int64_t)status.st_size, lock.l_type == F_UNLCK ? "unlocked" : "locked", bytes);
    else
        segment = map(opened, (uint64_t)status.st_size, pid);
    if (!segment)
        close(opened);
    return segment;
}

void segment_close_descriptor(tutti_segment *segment)
{
    if (segment->owner == getpid())
        return;
    close(segment->fd);
    segment->fd = -1;
}

TUTTI_API void *tutti_segment_base(const tutti_segment *segment)
{
    return segment->base;
}

TUTTI_API uint64_t tutti_segment_bytes(const tutti_segment *segment)
{
    return segment->bytes;
}

TUTTI_API int tutti_segment_fd(const tutti_segment *segment)
{
    return segment->fd;
}

TUTTI_API int tutti_segment_owner_lives(const tutti_segment *segment)
{
    if (segment->owner == getpid()) /* F_GETLK does not report locks of the calling process */
        return 1;
    struct flock lock = owner_lock();
    return fcntl(segment->fd, F_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}

TUTTI_API void tutti_segment_close(tutti_segment *segment)
{
    if (!segment)
        return;
    pthread_mutex_lock(&created_lock);
    bool last = --segment->references == 0;
    for (tutti_segment **link = &created; last && *link; link = &(*link)->next)
        if (*link == segment) {
            *link = segment->next;
            break;
        }
    pthread_mutex_unlock(&created_lock);
    if (!last)
        return;
    munmap(segment->base, segment->bytes);
    if (segment->fd >= 0)
        close(segment->fd);
    free(segment);
}
