/* The state of a group's messages: messages.c moves bytes through rings, mail.c decides who moves
 * them and when to give up. */
#ifndef TUTTI_MAIL_H
#define TUTTI_MAIL_H

#include "internal.h"

typedef struct parcel { /* a message put aside */
    int source;
    uint32_t tag;
    uint64_t bytes, moved;
    struct parcel *next;
    unsigned char content[];
} parcel;

typedef struct { /* the message at the head of a ring, half-way out of it */
    bool active;
    uint64_t bytes, moved;
    tutti_work *receiver; /* or else: */
    parcel *aside;
} arrival;

typedef struct {
    tutti_work *first, *last;
} list;

struct mail {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    list *outgoing; /* by peer, in the order sent */
    list wanted;    /* recvs in the order posted */
    arrival *arrivals;
    parcel *aside;
    int pending, pumps; /* operations; threads that move them while they wait */
    bool closing, carrying; /* carrying: a courier moves them now */
    pthread_t *couriers;
    int started, ready; /* couriers; those of them that are not inside a callback */
    uint64_t messages;
    crossing crossing;
};

/* After messages have moved: wakes the rank at the other end, or this rank's other threads. The
 * fence is between the mark just stored and the look at the sleepers; a sleeper counts itself, has
 * a fence, too, and looks at the marks once more. So one of the two sees the other. */
static inline void ring_for_mail(control *sleeper)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&sleeper->mail_sleepers, memory_order_relaxed))
        ring_bell(&sleeper->mail_bell);
}

/* All with the lock. Operations that are over are appended to a list, whose callbacks the caller
 * runs without the lock. */
void mail_send(tutti_group *, tutti_work *, list *over);
void mail_receive(tutti_group *, tutti_work *, list *over);
bool mail_progress(tutti_group *, list *over); /* whether a byte has moved */
void mail_fail(tutti_group *, int code, list *over);

#endif
