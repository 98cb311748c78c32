/* The state of a group's messages: messages.c moves bytes through rings, mail.c decides who moves
 * them, mail_trouble.c when they are given up. */
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
    pthread_cond_t left;  /* for couriers: nobody else moves what is pending */
    pthread_cond_t ended; /* for those who wait without moving */
    list *outgoing; /* by peer, in the order sent */
    list wanted;    /* recvs in the order posted */
    arrival *arrivals;
    parcel *aside;
    list over;           /* to be called back */
    int pending;         /* operations, until somebody calls them back */
    int movers;          /* threads that move them now, waiters and couriers, not in a callback */
    int inside, waiters; /* threads that a close must wait for; those that sleep on `ended` */
    bool closing;
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

/* All with the lock. What is over is appended to `over`. */
void mail_send(tutti_group *, tutti_work *);
void mail_receive(tutti_group *, tutti_work *);
bool mail_progress(tutti_group *); /* whether a byte has moved */
void mail_fail(tutti_group *, int code);
tutti_work *mail_take_over(mail *); /* the next to be called back, or NULL */
void mail_free(mail *); /* when no thread uses it any more */
/* Fails all operations if one of them can no longer succeed. */
void mail_look_for_trouble(tutti_group *, pause_state *);

#endif
