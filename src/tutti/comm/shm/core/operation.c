/* Operations: are the arguments sound, and what must be alike on all ranks? */
#include "internal.h"

#include <inttypes.h>

typedef struct {
    uint32_t in, out;
} shape;

static shape parts_of(const tutti_group *g, const tutti_operation *operation)
{
    uint32_t n = (uint32_t)g->size;
    bool root = operation->root == g->rank;
    switch (operation->kind) {
    case TUTTI_ALL_REDUCE: return (shape){1, 1};
    case TUTTI_REDUCE: return (shape){1, root};
    case TUTTI_BROADCAST: return root ? (shape){1, 0} : (shape){0, 1};
    case TUTTI_ALL_GATHER: return (shape){1, n};
    case TUTTI_REDUCE_SCATTER: return (shape){n, 1};
    case TUTTI_GATHER: return (shape){1, root ? n : 0};
    case TUTTI_SCATTER: return (shape){root ? n : 0, 1};
    case TUTTI_ALL_TO_ALL: return (shape){n, n};
    case TUTTI_SEND: return (shape){1, 0};
    case TUTTI_RECV: return (shape){0, 1};
    default: return (shape){0, 0};
    }
}

static bool has_root(uint32_t kind)
{
    return kind == TUTTI_REDUCE || kind == TUTTI_BROADCAST || kind == TUTTI_GATHER ||
           kind == TUTTI_SCATTER;
}

static bool reduces(uint32_t kind)
{
    return kind == TUTTI_ALL_REDUCE || kind == TUTTI_REDUCE || kind == TUTTI_REDUCE_SCATTER;
}

/* The pair of this rank's own in and out parts, which must be of one size. */
static bool own_parts(const tutti_group *g, const tutti_operation *operation, uint32_t *in,
                      uint32_t *out)
{
    if (!operation->in_parts || !operation->out_parts)
        return false;
    *in = operation->in_parts == 1 ? 0 : (uint32_t)g->rank;
    *out = operation->out_parts == 1 ? 0 : (uint32_t)g->rank;
    return true;
}

int check_operation(const tutti_group *g, const tutti_operation *operation)
{
    if (operation->kind > TUTTI_RECV)
        return fail(TUTTI_BAD_ARGUMENT, "kind %" PRIu32 " is no operation", operation->kind);
    const char *name = kind_name(operation->kind);
    if (operation->dtype > TUTTI_BYTES)
        return fail(TUTTI_BAD_ARGUMENT, "%s: dtype %" PRIu32 " is unknown", name, operation->dtype);
    if (has_root(operation->kind) && (operation->root < 0 || operation->root >= g->size))
        return fail(TUTTI_BAD_ARGUMENT, "%s: root %" PRId32 " is not a rank of group %s of %d",
                    name, operation->root, g->name, g->size);
    if (operation->kind >= TUTTI_SEND) {
        int lowest = operation->kind == TUTTI_RECV ? -1 : 0;
        if (operation->peer < lowest || operation->peer >= g->size || operation->peer == g->rank)
            return fail(TUTTI_BAD_ARGUMENT,
                        "%s: peer %" PRId32 " is not another rank of group %s of %d", name,
                        operation->peer, g->name, g->size);
    }
    shape expected = parts_of(g, operation);
    if (operation->in_parts != expected.in || operation->out_parts != expected.out)
        return fail(TUTTI_BAD_ARGUMENT,
                    "%s on rank %d takes %" PRIu32 " parts in and %" PRIu32 " out, got %" PRIu32
                    " and %" PRIu32,
                    name, g->rank, expected.in, expected.out, operation->in_parts,
                    operation->out_parts);
    for (uint32_t i = 0; i < operation->in_parts; i++)
        if (operation->in_bytes[i] && !operation->in[i])
            return fail(TUTTI_BAD_ARGUMENT, "%s: part %" PRIu32 " in is NULL", name, i);
    for (uint32_t i = 0; i < operation->out_parts; i++)
        if (operation->out_bytes[i] && !operation->out[i])
            return fail(TUTTI_BAD_ARGUMENT, "%s: part %" PRIu32 " out is NULL", name, i);
    uint32_t in, out;
    if (own_parts(g, operation, &in, &out) && operation->in_bytes[in] != operation->out_bytes[out])
        return fail(TUTTI_BAD_ARGUMENT,
                    "%s: rank %d gives itself %" PRIu64 " bytes and takes %" PRIu64, name, g->rank,
                    operation->in_bytes[in], operation->out_bytes[out]);
    if (!reduces(operation->kind))
        return 0;
    if (!can_reduce(operation->dtype, operation->reduce))
        return fail(TUTTI_BAD_ARGUMENT, "%s: %s of %s is not defined", name,
                    reduce_name(operation->reduce), dtype_name(operation->dtype));
    for (uint32_t i = 0; i < operation->in_parts; i++)
        if (operation->in_bytes[i] % dtype_bytes(operation->dtype))
            return fail(TUTTI_BAD_ARGUMENT, "%s: %" PRIu64 " bytes are no whole number of %s", name,
                        operation->in_bytes[i], dtype_name(operation->dtype));
    return 0;
}

uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 31);
}

uint64_t operation_print(const tutti_operation *operation)
{
    uint64_t print = operation->kind | operation->dtype << 8 |
                     (reduces(operation->kind) ? operation->reduce << 16 : 0);
    print = mix(print, (uint64_t)(uint32_t)operation->root << 1);
    switch (operation->kind) {
    case TUTTI_ALL_REDUCE:
    case TUTTI_REDUCE: print = mix(print, operation->in_bytes[0]); break;
    case TUTTI_BROADCAST: print = mix(print, operation_bytes(operation)); break;
    case TUTTI_ALL_GATHER:
        for (uint32_t i = 0; i < operation->out_parts; i++)
            print = mix(print, operation->out_bytes[i]);
        break;
    case TUTTI_REDUCE_SCATTER:
        for (uint32_t i = 0; i < operation->in_parts; i++)
            print = mix(print, operation->in_bytes[i]);
        break;
    default: break; /* no rank knows all sizes: those that do compare them as they meet */
    }
    return print ? print : 1;
}
