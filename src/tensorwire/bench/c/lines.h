// How a program of the benchmark is driven: lines on its standard input and output, the same in every language.
//
// It prints one line that its partner needs (`hello`), reads the partner's, sets up, and prints `ready`. Then, for each
// line "run ROUND WARM COUNT", both partners do WARM operations that nobody times and COUNT that the initiator times,
// check what has arrived, and answer with one line of JSON. It ends with its input. The target gets its line before the
// initiator, except where it has to be asleep meanwhile: then it gets it when the initiator has answered.
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096, LINE = 512 };

static void die(const char* what) {
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "failed");
    exit(1);
}

// The benchmark may be killed while this program spins.
static void leave_with_parent(void) { prctl(PR_SET_PDEATHSIG, SIGKILL); }

static void hello(const char* ours, char theirs[LINE]) {
    printf("%s\n", ours);
    fflush(stdout);
    if (!fgets(theirs, LINE, stdin)) exit(0);
}

static void ready(void) {
    printf("ready\n");
    fflush(stdout);
}

struct run {
    uint64_t round;
    long warm, count;
};

static int next_run(struct run* run) {
    char line[LINE];
    if (!fgets(line, sizeof line, stdin)) return 0;
    errno = EINVAL;
    if (sscanf(line, "run %lu %ld %ld", &run->round, &run->warm, &run->count) != 3) die(line);
    return 1;
}

static void answer(double seconds) {
    printf("{\"seconds\": %.9f}\n", seconds);
    fflush(stdout);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// A block that is another one in each round, over and over: what is stale, missing or torn shows.
static void make_block(unsigned char block[BLOCK], uint64_t round) {
    uint64_t x = (round + 1) * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < BLOCK; i += 8) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        memcpy(block + i, &x, 8);
    }
}

static void fill(char* memory, size_t nbytes, uint64_t round) {
    unsigned char block[BLOCK];
    make_block(block, round);
    for (size_t i = 0; i < nbytes; i += BLOCK) memcpy(memory + i, block, nbytes - i < BLOCK ? nbytes - i : BLOCK);
}

static void check(const char* memory, size_t nbytes, uint64_t round) {
    unsigned char block[BLOCK];
    make_block(block, round);
    for (size_t i = 0; i < nbytes; i += BLOCK) {
        errno = 0;
        if (memcmp(memory + i, block, nbytes - i < BLOCK ? nbytes - i : BLOCK)) die("the bytes that arrived are wrong");
    }
}
