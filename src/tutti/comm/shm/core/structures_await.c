/* Waiting for a word and seeing what it holds, in one call from an interpreter. */
#include "structures.h"
#include "tutti_shm.h"

uint64_t tutti_await_word(const uint64_t *word, uint64_t at_least, double timeout_s) {
    tutti_wait_signal(word, at_least, timeout_s, NULL);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
