// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Grants the user with UID argv[1] (default 1000) read access to a region, until standard input
 * has a line or ends.
 * cc grants.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
	static const char text[] = "for your eyes only";
	uint32_t uid = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
	int own = LT_join(NULL);
	LT_lh board = own < 0 ? own : LT_malloc(NULL, 0, 4096, "board", 0);
	int err = board < 0 ? (int)board : LT_write(board, 0, text, strlen(text));

	if (!err)
		err = LT_grant(board, uid, LT_READ);
	if (!err) {
		printf("user %u may read the region board\n", uid);
		fflush(stdout);
		getchar();
		err = LT_grant(board, uid, 0);
	}
	if (!err)
		printf("access revoked\n");
	if (err)
		fprintf(stderr, "grants: %s\n", strerror(-err));
	return LT_free(board) < 0 || err;
}
