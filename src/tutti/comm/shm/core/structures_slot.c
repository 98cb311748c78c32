/* Slots with one writer, copied by others while they may change: a sequence lock without a lock.
 *
 * The sequence is odd while the owner writes. begin() makes it odd, then executes a release fence,
 * then words are stored; end() makes it even by a release store. A copier checks the sequence
 * (acquire), copies by relaxed words, executes an acquire fence and checks again. If its copy holds
 * a word of a later writing, the two fences synchronise and the second check sees that writing's
 * begin(): the copy is refused. Nobody announces that he copies, so a copier that dies leaves
 * nothing behind, and a writer never waits. */
#include "cell.h"

void tutti_slot_begin(uint64_t *sequence) {
    uint64_t now = __atomic_load_n(sequence, __ATOMIC_RELAXED);
    __atomic_store_n(sequence, now | 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

void tutti_slot_write(void *to, const void *from, uint64_t bytes) { words_store(to, from, bytes); }

uint64_t tutti_slot_end(uint64_t *sequence) {
    uint64_t next = (__atomic_load_n(sequence, __ATOMIC_RELAXED) | 1) + 1;
    __atomic_store_n(sequence, next, __ATOMIC_RELEASE);
    return next;
}

int tutti_slot_copy(void *to, const void *from, uint64_t bytes, const uint64_t *sequence,
                    uint64_t expected) {
    const uint64_t *source = from;
    uint64_t *target = to; /* a slot itself, or any memory that is aligned and padded as one */
    if (__atomic_load_n(sequence, __ATOMIC_ACQUIRE) != expected)
        return 0;
    for (uint64_t i = 0; i < words_of(bytes); ++i)
        __atomic_store_n(target + i, __atomic_load_n(source + i, __ATOMIC_RELAXED),
                         __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(sequence, __ATOMIC_RELAXED) == expected;
}
