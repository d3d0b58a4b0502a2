// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Server of the sample rpc.c: receives one call, and unmaps its handle without a reply. Then sleeps
 * until a signal kills it.
 */
#include <kite/lite.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	static char text[0x100000];
	struct LT_call call;
	int joined = LT_join(NULL);
	LT_lh lh = joined < 0 ? joined : LT_malloc(NULL, 0, 1, "capitals", LT_WRITE);
	int64_t err = lh < 0 ? lh : LT_regRPC(lh, 0, sizeof(text));

	if (err == 0) {
		puts("serving");
		fflush(stdout);
		err = LT_recvRPC(lh, &call, text, sizeof(text));
	}
	if (err >= 0)
		err = LT_unmap(lh);
	printf("unmapped: %lld\n", (long long)err);
	fflush(stdout);
	pause();
	return 0;
}
