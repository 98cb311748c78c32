/* A work: one operation under way, from its call until both its caller and its queue let it go. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

tutti_work *work_create(tutti_group *g, const tutti_operation *op, double timeout, tutti_done done,
                        void *argument)
{
    size_t pointers = op->in_parts + op->out_parts;
    tutti_work *work = calloc(1, sizeof *work + pointers * (sizeof(void *) + sizeof(uint64_t)));
    if (!work) {
        fail(TUTTI_NO_MEMORY, "no memory for an operation of %zu parts", pointers);
        return NULL;
    }
    const void **in = (const void **)work->parts;
    void **out = work->parts + op->in_parts;
    uint64_t *in_bytes = (uint64_t *)(out + op->out_parts), *out_bytes = in_bytes + op->in_parts;
    for (uint32_t i = 0; i < op->in_parts; i++) {
        in[i] = op->in[i];
        in_bytes[i] = op->in_bytes[i];
    }
    for (uint32_t i = 0; i < op->out_parts; i++) {
        out[i] = op->out[i];
        out_bytes[i] = op->out_bytes[i];
    }
    work->operation = *op;
    work->operation.in = in;
    work->operation.in_bytes = in_bytes;
    work->operation.out = out;
    work->operation.out_bytes = out_bytes;
    work->operation.where = NULL; /* it is in the ledger; the text is the caller's */
    work->operation.source = NULL;
    work->timeout = timeout;
    work->done = done;
    work->argument = argument;
    work->group = g;
    work->source = -1;
    atomic_init(&work->references, 2); /* the caller's and the queue's */
    return work;
}

void work_release(tutti_work *work)
{
    if (atomic_fetch_sub_explicit(&work->references, 1, memory_order_acq_rel) == 1) {
        free(work->text);
        free(work);
    }
}

static _Thread_local int callbacks; /* that this thread is inside of */

bool inside_callback(void)
{
    return callbacks > 0;
}

void work_end(tutti_work *work, int code, const char *text)
{
    work->code = code;
    if (code < 0)
        work->text = strdup(text);
    atomic_store_explicit(&work->is_done, 1, memory_order_release);
}

void work_call_back(tutti_work *work)
{
    if (!work->done)
        return;
    callbacks++;
    work->done(work->argument, work->code, work->text ? work->text : "");
    callbacks--;
}

TUTTI_API int tutti_work_is_done(const tutti_work *work)
{
    return atomic_load_explicit(&work->is_done, memory_order_acquire);
}

TUTTI_API int32_t tutti_work_source(const tutti_work *work)
{
    return work->source;
}

TUTTI_API void tutti_work_free(tutti_work *work)
{
    if (work)
        work_release(work);
}
