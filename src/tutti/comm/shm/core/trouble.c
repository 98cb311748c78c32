/* What makes a group unusable, here and on its peers, and how each learns of the other's trouble. */
#include "internal.h"

#include <string.h>

int group_usable(tutti_group *g)
{
    int code = refuse_forked_child(g);
    if (code)
        return code;
    code = atomic_load_explicit(&g->broken, memory_order_acquire);
    if (code) {
        pthread_mutex_lock(&g->broken_lock);
        fail(code, "%s%s", g->broken_text ? g->broken_text : "",
             code == TUTTI_CLOSED ? "" : ": the group cannot be used any more");
        pthread_mutex_unlock(&g->broken_lock);
        return code;
    }
    if (g->connected != g->size)
        return fail(TUTTI_BAD_ARGUMENT, "rank %d of group %s is connected to %d of %d ranks",
                    g->rank, g->name, g->connected, g->size);
    return 0;
}

int break_group(tutti_group *g, int code, const char *text)
{
    control *own = g->peers[g->rank].control;
    pthread_mutex_lock(&g->broken_lock);
    if (!atomic_load_explicit(&g->broken, memory_order_relaxed)) {
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
    fail(code, "%s", g->broken_text ? g->broken_text : "");
    pthread_mutex_unlock(&g->broken_lock);
    return code;
}

int peer_trouble(tutti_group *g, int rank, bool look_for_death)
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
    if (look_for_death && !tutti_segment_owner_lives(peer->segment)) {
        char last[512];
        describe_peer(g, rank, last, sizeof last);
        return fail(TUTTI_PEER_DIED, "%s of group %s has died", last, g->name);
    }
    return 0;
}
