/* Messages: send and recv, with tags.
 *
 * For every ordered pair of ranks there is a ring in the sender's segment. A message is a header
 * and its bytes, streamed as room comes free; positions are multiples of GRAIN, so a header never
 * wraps around. The sender's position is stored with release after the bytes are written and loaded
 * with acquire before they are read; the receiver's position likewise frees room.
 *
 * Messages make progress independently of collectives, in whatever thread is waiting for one, or
 * else in the group's courier thread, always under the mail's lock. A message for which nobody
 * waits stays in its ring, until a recv of the same sender needs what lies behind it: then it is
 * put aside. */
#include "mail.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GRAIN 32
#define PIECE (32 * 1024) /* published at once, so that both sides copy at the same time */

typedef struct {
    uint64_t bytes;
    uint32_t tag, dtype;
    uint64_t unused[2];
} heading;
_Static_assert(sizeof(heading) == GRAIN, "a heading fills one grain of a ring");

static void append(list *to, tutti_work *work)
{
    work->next = NULL;
    if (to->last)
        to->last->next = work;
    else
        to->first = work;
    to->last = work;
}

static void take_out(list *from, tutti_work *work)
{
    tutti_work *before = NULL;
    for (tutti_work *at = from->first; at != work; at = at->next)
        before = at;
    *(before ? &before->next : &from->first) = work->next;
    if (from->last == work)
        from->last = before;
}

static void conclude(mail *m, tutti_work *work, int code)
{
    work->code = code;
    append(&m->over, work);
}

tutti_work *mail_take_over(mail *m)
{
    tutti_work *work = m->over.first;
    if (work) {
        take_out(&m->over, work);
        m->pending--;
    }
    return work;
}

static bool push(tutti_group *g, int to)
{
    list *queue = &g->mail->outgoing[to];
    unsigned char *ring = g->peers[g->rank].rings + lane(g->rank, to) * g->ring_bytes;
    _Atomic uint64_t *head_at = &g->peers[g->rank].sent[to].at;
    uint64_t head = atomic_load_explicit(head_at, memory_order_relaxed), begun = head;
    while (queue->first) {
        tutti_work *work = queue->first;
        uint64_t bytes = work->operation.in_bytes[0];
        uint64_t tail =
            atomic_load_explicit(&g->peers[to].received[g->rank].at, memory_order_acquire);
        uint64_t room = g->ring_bytes - (head - tail);
        if (!room)
            break;
        if (!work->started) {
            heading heading = {bytes, work->operation.tag, work->operation.dtype, {0, 0}};
            memcpy(ring + head % g->ring_bytes, &heading, GRAIN);
            work->started = true;
            head += GRAIN;
            room -= GRAIN;
        }
        uint64_t length = bytes - work->moved, straight = g->ring_bytes - head % g->ring_bytes;
        length = length < room ? length : room;
        length = length < straight ? length : straight;
        length = length < PIECE ? length : PIECE;
        hand_over(&g->mail->crossing, ring + head % g->ring_bytes,
                  (const unsigned char *)work->operation.in[0] + work->moved, length);
        work->moved += length;
        head += (length + GRAIN - 1) / GRAIN * GRAIN;
        atomic_store_explicit(head_at, head, memory_order_release);
        if (work->moved == bytes) {
            take_out(queue, work);
            conclude(g->mail, work, 0);
        }
    }
    if (head != begun)
        ring_for_mail(g->peers[to].control);
    return head != begun;
}

static bool wants(const tutti_work *receiver, int source, uint32_t tag)
{
    return (receiver->operation.peer == source || receiver->operation.peer == -1) &&
           receiver->operation.tag == tag;
}

static int wrong_size(tutti_group *g, tutti_work *receiver, int source, uint64_t bytes)
{
    char text[400];
    snprintf(text, sizeof text,
             "recv %" PRIu64 " of group %s on rank %d takes %" PRIu64
             " bytes from rank %d (tag %" PRIu32 "), which sent %" PRIu64,
             receiver->sequence, g->name, g->rank, receiver->operation.out_bytes[0], source,
             receiver->operation.tag, bytes);
    return break_group(g, TUTTI_MISMATCH, text);
}

/* Decides where the message at the head of a ring goes; false: nowhere yet. */
static bool open_arrival(tutti_group *g, int source, const heading *heading)
{
    mail *m = g->mail;
    tutti_work *receiver = m->wanted.first;
    while (receiver && !wants(receiver, source, heading->tag))
        receiver = receiver->next;
    parcel *aside = NULL;
    if (receiver) {
        if (receiver->operation.out_bytes[0] != heading->bytes) {
            wrong_size(g, receiver, source, heading->bytes);
            return false;
        }
        take_out(&m->wanted, receiver);
        receiver->source = source;
    } else {
        aside = malloc(sizeof *aside + heading->bytes);
        if (!aside) {
            char text[200];
            snprintf(text, sizeof text,
                     "no memory for %" PRIu64 " bytes from rank %d (tag %" PRIu32
                     ") that nobody receives yet",
                     heading->bytes, source, heading->tag);
            break_group(g, TUTTI_NO_MEMORY, text);
            return false;
        }
        *aside = (parcel){source, heading->tag, heading->bytes, 0, NULL};
        parcel **end = &m->aside;
        while (*end)
            end = &(*end)->next;
        *end = aside;
    }
    m->arrivals[source] = (arrival){true, heading->bytes, 0, receiver, aside};
    return true;
}

static bool source_is_wanted(const mail *m, int source)
{
    const arrival *arrival = &m->arrivals[source];
    if (arrival->active && arrival->receiver)
        return true;
    for (tutti_work *work = m->wanted.first; work; work = work->next)
        if (work->operation.peer == source || work->operation.peer == -1)
            return true;
    return false;
}

static bool pull(tutti_group *g, int source)
{
    mail *m = g->mail;
    arrival *arrival = &m->arrivals[source];
    const unsigned char *ring = g->peers[source].rings + lane(source, g->rank) * g->ring_bytes;
    _Atomic uint64_t *tail_at = &g->peers[g->rank].received[source].at;
    uint64_t tail = atomic_load_explicit(tail_at, memory_order_relaxed), begun = tail;
    while (source_is_wanted(m, source)) {
        uint64_t head =
            atomic_load_explicit(&g->peers[source].sent[g->rank].at, memory_order_acquire);
        uint64_t there = head - tail;
        if (!arrival->active) {
            heading heading;
            if (!there)
                break;
            memcpy(&heading, ring + tail % g->ring_bytes, GRAIN);
            if (!open_arrival(g, source, &heading))
                break;
            tail += GRAIN;
            there -= GRAIN;
        } else if (!there)
            break;
        uint64_t length = arrival->bytes - arrival->moved;
        uint64_t straight = g->ring_bytes - tail % g->ring_bytes;
        length = length < there ? length : there;
        length = length < straight ? length : straight;
        length = length < PIECE ? length : PIECE;
        unsigned char *to = arrival->receiver ? arrival->receiver->operation.out[0]
                                              : arrival->aside->content;
        if (length)
            copy_bytes(to + arrival->moved, ring + tail % g->ring_bytes, length);
        arrival->moved += length;
        if (arrival->aside)
            arrival->aside->moved = arrival->moved;
        tail += (length + GRAIN - 1) / GRAIN * GRAIN;
        atomic_store_explicit(tail_at, tail, memory_order_release);
        if (arrival->moved == arrival->bytes) {
            if (arrival->receiver)
                conclude(m, arrival->receiver, 0);
            arrival->active = false;
        }
    }
    if (tail != begun)
        ring_for_mail(g->peers[source].control);
    return tail != begun;
}

void mail_send(tutti_group *g, tutti_work *work)
{
    append(&g->mail->outgoing[work->operation.peer], work);
    push(g, work->operation.peer);
}

/* A new recv may be for a message that was put aside, perhaps not all of it yet. */
static void look_aside(tutti_group *g, tutti_work *work)
{
    mail *m = g->mail;
    parcel **link = &m->aside;
    while (*link && !wants(work, (*link)->source, (*link)->tag))
        link = &(*link)->next;
    parcel *found = *link;
    if (!found) {
        append(&m->wanted, work);
        return;
    }
    if (found->bytes != work->operation.out_bytes[0]) {
        int code = wrong_size(g, work, found->source, found->bytes);
        conclude(m, work, code);
        return;
    }
    *link = found->next;
    work->source = found->source;
    if (found->moved)
        memcpy(work->operation.out[0], found->content, found->moved);
    if (found->moved == found->bytes)
        conclude(m, work, 0);
    else {
        m->arrivals[found->source].receiver = work;
        m->arrivals[found->source].aside = NULL;
    }
    free(found);
}

void mail_receive(tutti_group *g, tutti_work *work)
{
    look_aside(g, work);
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && (work->operation.peer == rank || work->operation.peer == -1))
            pull(g, rank);
}

bool mail_progress(tutti_group *g)
{
    bool moved = false;
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank)
            continue;
        if (g->mail->outgoing[rank].first)
            moved |= push(g, rank);
        moved |= pull(g, rank);
    }
    return moved;
}

void mail_fail(tutti_group *g, int code)
{
    mail *m = g->mail;
    for (int rank = 0; rank < g->size; rank++) {
        while (m->outgoing[rank].first) {
            tutti_work *work = m->outgoing[rank].first;
            take_out(&m->outgoing[rank], work);
            conclude(m, work, code);
        }
        if (m->arrivals[rank].active && m->arrivals[rank].receiver) {
            conclude(m, m->arrivals[rank].receiver, code);
            m->arrivals[rank].active = false;
        }
    }
    while (m->wanted.first) {
        tutti_work *work = m->wanted.first;
        take_out(&m->wanted, work);
        conclude(m, work, code);
    }
}
