/* Errors: the last error of each thread, groups that are permanently broken, and errors of peers.
 *
 * A group breaks once. The first failure's code and message are kept in the process (g->broken) and
 * published in the rank's control block (state, code, reason), so that peers report the cause,
 * and not only that this rank is missing. Breaking a group wakes all sleeping threads. Threads
 * of this rank sleep on the futex words of peers, and threads of peers sleep on the futex words of
 * this rank, so the futex words of all ranks are incremented. A thread that is about to sleep reads
 * the futex word first and then checks g->broken and the peer's state (rounds.c, p2p.c). So either
 * the check sees the change, or the increment comes after the read of the word and the kernel does
 * not let the thread sleep. */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char error_text[8192];
static _Thread_local int error_code;

TUTTI_API const char *tutti_error(void)
{
    return error_text;
}

TUTTI_API int tutti_error_code(void)
{
    return error_code;
}

/* The loader (jit_build.py) searches the library file for this mark, to check whether the library
 * was built from the current sources. */
#ifndef TUTTI_SOURCE_HASH
#define TUTTI_SOURCE_HASH "unknown"
#endif
__attribute__((used)) TUTTI_API const char tutti_built_from[] =
    "tutti-built-from:" TUTTI_SOURCE_HASH ";";

TUTTI_API int tutti_abi(void)
{
    return TUTTI_ABI;
}

int fail(int code, const char *format, ...)
{
    char text[sizeof error_text]; /* an argument may point into error_text */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(error_text, text, strlen(text) + 1);
    error_code = code;
    return code;
}

int fail_errno(const char *what)
{
    return fail(TUTTI_SYSTEM, "%s: %s", what, strerror(errno));
}

int group_usable(tutti_group *g)
{
    int code = refuse_forked_child(g);
    if (code)
        return code;
    code = atomic_load_explicit(&g->broken, memory_order_acquire);
    if (code) {
        pthread_mutex_lock(&g->broken_lock);
        fail(code, "%s%s",
             g->broken_text ? g->broken_text : "there was no memory for the error message",
             code == TUTTI_CLOSED ? "" : ": the group cannot be used any more");
        pthread_mutex_unlock(&g->broken_lock);
        return code;
    }
    if (g->connected != g->size)
        return fail(TUTTI_BAD_ARGUMENT, "rank %d of group %s is connected to only %d of %d ranks",
                    g->rank, g->name, g->connected, g->size);
    return 0;
}

static void wake_all_waiters(tutti_group *g)
{
    for (int rank = 0; rank < g->size; rank++) {
        control *control = g->peers[rank].control;
        if (!control) /* not connected yet */
            continue;
        futex_wake_all(&control->futex);
        futex_wake_all(&control->p2p_futex);
    }
}

int break_group(tutti_group *g, int code, const char *text)
{
    control *own = g->peers[g->rank].control;
    pthread_mutex_lock(&g->broken_lock);
    bool first = !atomic_load_explicit(&g->broken, memory_order_relaxed);
    if (first) {
        g->broken_text = strdup(text);
        if (code != TUTTI_CLOSED) {
            text_to_words(own->reason, TUTTI_REASON_WORDS, text);
            atomic_store_explicit(&own->code, code, memory_order_relaxed);
        }
        atomic_store_explicit(&own->state, code == TUTTI_CLOSED ? LEFT : BROKEN,
                              memory_order_release);
        atomic_store_explicit(&g->broken, code, memory_order_release);
    }
    code = atomic_load_explicit(&g->broken, memory_order_relaxed);
    fail(code, "%s", g->broken_text ? g->broken_text : text);
    pthread_mutex_unlock(&g->broken_lock);
    if (first)
        wake_all_waiters(g);
    return code;
}

int peer_error(tutti_group *g, int rank, bool check_alive)
{
    int code = atomic_load_explicit(&g->broken, memory_order_acquire);
    if (code)
        return group_usable(g);
    peer *peer = &g->peers[rank];
    uint32_t state = atomic_load_explicit(&peer->control->state, memory_order_acquire);
    if (state == LEFT)
        return fail(TUTTI_PEER_LEFT, "rank %d of group %s closed the group", rank, g->name);
    if (state == BROKEN) {
        char reason[TUTTI_REASON_WORDS * 8];
        words_to_text(peer->control->reason, TUTTI_REASON_WORDS, reason);
        code = atomic_load_explicit(&peer->control->code, memory_order_relaxed);
        return fail(code, "%s", reason);
    }
    if (check_alive && !tutti_segment_owner_lives(peer->segment)) {
        char last[512];
        describe_peer(g, rank, last, sizeof last);
        return fail(TUTTI_PEER_DIED, "%s of group %s has died", last, g->name);
    }
    return 0;
}
