/* A fault of each kind that scripts/sanitize must find: built with the same flags, run first. */
#include <pthread.h>
#include <stdlib.h>

static int shared;

static void *write_shared(void *unused)
{
    for (int i = 0; i < 100000; i++)
        shared++;
    return unused;
}

int address_fault(int past)
{
    /* Of a pointer that it knows nothing about, UndefinedBehaviorSanitizer is silent. */
    volatile char *volatile memory = malloc(8);
    memory[8 + past] = 1;
    free((void *)memory);
    return 0;
}

int undefined_fault(int more)
{
    volatile int most = 0x7fffffff;
    return most + 1 + more;
}

int thread_fault(void)
{
    pthread_t one, two;
    pthread_create(&one, NULL, write_shared, NULL);
    pthread_create(&two, NULL, write_shared, NULL);
    pthread_join(one, NULL);
    pthread_join(two, NULL);
    return 0;
}
