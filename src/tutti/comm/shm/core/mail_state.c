/* Making and freeing what a group knows of its messages. */
#include "mail.h"

#include <stdlib.h>
#include <time.h>

int mail_create(tutti_group *g)
{
    mail *m = calloc(1, sizeof *m);
    if (m) {
        m->outgoing = calloc((size_t)g->size, sizeof *m->outgoing);
        m->arrivals = calloc((size_t)g->size, sizeof *m->arrivals);
    }
    if (!m || !m->outgoing || !m->arrivals) {
        if (m) {
            free(m->outgoing);
            free(m->arrivals);
        }
        free(m);
        return fail(TUTTI_NO_MEMORY, "no memory for the messages of %d ranks", g->size);
    }
    pthread_mutex_init(&m->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&m->left, NULL);
    pthread_cond_init(&m->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    g->mail = m;
    return 0;
}

void mail_free(mail *m)
{
    free(m->couriers);
    while (m->aside) {
        parcel *next = m->aside->next;
        free(m->aside);
        m->aside = next;
    }
    pthread_cond_destroy(&m->left);
    pthread_cond_destroy(&m->ended);
    pthread_mutex_destroy(&m->lock);
    free(m->outgoing);
    free(m->arrivals);
    free(m);
}
