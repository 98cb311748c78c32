/* When messages are given up: their time is over, or a peer is gone. */
#include "mail.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static int message_trouble(tutti_group *g, tutti_work *work, int rank, uint64_t now, bool due)
{
    bool sends = work->operation.kind == TUTTI_SEND;
    char text[6000], who[600] = "any rank";
    snprintf(text, sizeof text, "%s %" PRIu64 " of group %s (tag %" PRIu32 ", %" PRIu64 " bytes)",
             kind_name(work->operation.kind), work->sequence, g->name, work->operation.tag,
             operation_bytes(&work->operation));
    size_t length = strlen(text);
    if (now >= work->deadline) {
        if (rank >= 0)
            describe_peer(g, rank, who, sizeof who);
        snprintf(text + length, sizeof text - length,
                 " timed out after %.1f s on rank %d: waiting for %s", work->timeout, g->rank, who);
        return break_group(g, TUTTI_TIMEOUT, text);
    }
    int left = 0, code = 0;
    for (int other = 0; other < g->size && !code; other++) {
        if (other == g->rank || (rank >= 0 && other != rank))
            continue;
        code = peer_trouble(g, other, due);
        /* In this order: what it sent before it left, or died, still arrives. */
        if (code && !sends && !atomic_load(&g->broken) &&
            atomic_load(&g->peers[other].sent[g->rank].at) !=
                atomic_load(&g->peers[g->rank].received[other].at))
            code = 0;
        if (code == TUTTI_PEER_LEFT && rank < 0 && ++left < g->size - 1)
            code = 0;
    }
    if (!code)
        return 0;
    snprintf(text + length, sizeof text - length, " on rank %d: %s", g->rank, tutti_error());
    return break_group(g, code, text);
}

/* Each has its own deadline; what ails a peer ails all messages to it alike. */
void mail_look_for_trouble(tutti_group *g, pause_state *pause)
{
    mail *m = g->mail;
    uint64_t now = now_ns();
    bool due = life_check_is_due(pause, now);
    int code = atomic_load_explicit(&g->broken, memory_order_acquire);
    for (int rank = 0; rank < g->size && !code; rank++) {
        tutti_work *first = m->outgoing[rank].first;
        for (tutti_work *work = first; work && !code; work = work->next)
            if (work == first || now >= work->deadline)
                code = message_trouble(g, work, rank, now, due);
        if (!code && m->arrivals[rank].active && m->arrivals[rank].receiver)
            code = message_trouble(g, m->arrivals[rank].receiver, rank, now, due);
    }
    for (tutti_work *work = m->wanted.first; work && !code; work = work->next)
        code = message_trouble(g, work, work->operation.peer, now, due);
    if (code)
        mail_fail(g, code);
}
