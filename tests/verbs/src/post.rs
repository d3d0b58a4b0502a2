// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Posting of requests and polling for their completions.

use std::ffi::CStr;
use std::mem::zeroed;
use std::ptr;

use anyhow::{bail, ensure, Context, Result};

use crate::raw::*;
use crate::{done, Pair, Request, Spot, Verb, CHAIN, DEPTH};

impl Pair {
    /// Moves the first `len` bytes of the buffer once, and waits for the completion as impatient programs
    /// do.
    ///
    /// # Errors
    /// As of [`Self::post`] and [`Self::poll`].
    pub fn transfer(&self, verb: Verb, other: Spot, len: usize) -> Result<()> {
        self.post(&[Request::whole(verb, other, len)])?;
        self.wait()
    }

    /// Waits for a completion.
    ///
    /// # Errors
    /// As of [`Self::poll`].
    pub fn wait(&self) -> Result<()> {
        while !self.poll()? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Moves the whole buffer `count` times, with `depth` requests under way.
    ///
    /// # Errors
    /// As of [`Self::post`] and [`Self::poll`].
    pub fn stream(&self, verb: Verb, other: Spot, count: usize, depth: usize) -> Result<()> {
        ensure!(depth <= DEPTH, "at most {DEPTH} at a time");
        let (mut begun, mut done) = (0, 0);
        while done < count {
            while begun < count && begun - done < depth {
                self.post(&[Request::whole(verb, other, self.buffer.memory.len())])?;
                begun += 1;
            }
            while self.poll()? {
                done += 1;
            }
        }
        Ok(())
    }

    /// Posts requests, at most [`CHAIN`] by one call. At most [`DEPTH`] may be under way.
    ///
    /// # Errors
    /// If there are too many, one is not in the buffer, or the queue pair is full or has failed.
    pub fn post(&self, requests: &[Request]) -> Result<()> {
        match requests.len() {
            0 => Ok(()),
            1 => self.post_chain::<1>(requests),
            _ => self.post_chain::<CHAIN>(requests),
        }
    }

    /// Posts at least one request and at most `N`, from the stack: it is timed, and nothing is allocated.
    fn post_chain<const N: usize>(&self, requests: &[Request]) -> Result<()> {
        ensure!(requests.len() <= N, "more than {N} requests in a chain");
        let mut pieces = [ibv_sge::default(); N];
        for (piece, request) in pieces.iter_mut().zip(requests) {
            *piece = self.piece(request.at, request.len)?;
        }
        // SAFETY: zero is a request of opcode 0 and nothing else; pointers and unions allow it.
        let mut chain: [ibv_send_wr; N] = unsafe { zeroed() };
        // All pointers come from these, which are the only borrows until the chain is posted.
        let (piece, first) = (pieces.as_mut_ptr(), chain.as_mut_ptr());
        for (i, request) in requests.iter().enumerate() {
            // SAFETY: there are as many as requests at least.
            unsafe {
                request.fill(&mut *first.add(i), piece.add(i));
                if i > 0 {
                    (*first.add(i - 1)).next = first.add(i);
                }
            }
        }
        self.post_first(first)
    }

    /// Receives one message to `len` bytes of the buffer from `at` on. One at a time may be waited for.
    ///
    /// # Errors
    /// If they are not in the buffer, or another is waited for.
    pub fn receive(&self, at: usize, len: usize) -> Result<()> {
        let mut piece = self.piece(at, len)?;
        let mut request = ibv_recv_wr {
            sg_list: &mut piece,
            num_sge: 1,
            ..Default::default()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: all objects are live, and the request and its list too; the memory stays for as long as the pair.
        let code = unsafe {
            let post = self.buffer.device.context.as_ref().ops.post_recv;
            post.context("no post_recv")?(self.qp.as_ptr(), &mut request, &mut bad)
        };
        done(code).context("posting that a message is received")
    }

    fn piece(&self, at: usize, len: usize) -> Result<ibv_sge> {
        let end = at.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.buffer.memory.len()),
            "more than the buffer has"
        );
        Ok(ibv_sge {
            addr: self.end.spot.addr + at as u64,
            length: u32::try_from(len)?,
            // SAFETY: the memory region is live.
            lkey: unsafe { self.buffer.mr.as_ref() }.lkey,
        })
    }

    fn post_first(&self, request: *mut ibv_send_wr) -> Result<()> {
        let mut bad = ptr::null_mut();
        // SAFETY: all objects are live, and the requests and their lists too; the memory stays for as long as the pair.
        let code = unsafe {
            let post = self.buffer.device.context.as_ref().ops.post_send;
            post.context("no post_send")?(self.qp.as_ptr(), request, &mut bad)
        };
        done(code).context("posting a request")
    }

    /// Returns `true` if a request has completed.
    ///
    /// # Errors
    /// If it has failed.
    pub fn poll(&self) -> Result<bool> {
        // SAFETY: the device is open.
        let poll = unsafe { self.buffer.device.context.as_ref() }.ops.poll_cq;
        let poll = poll.context("no poll_cq")?;
        // SAFETY: it is plain numbers.
        let mut completion: ibv_wc = unsafe { zeroed() };
        // SAFETY: the queue is live, and there is room for one completion.
        match unsafe { poll(self.buffer.device.cq.as_ptr(), 1, &mut completion) } {
            0 => Ok(false),
            1 if completion.status == IBV_WC_SUCCESS => Ok(true),
            1 => {
                // SAFETY: the function returns a constant string for any status.
                let why = unsafe { CStr::from_ptr(ibv_wc_status_str(completion.status)) };
                bail!("a request failed: {}", why.to_string_lossy());
            }
            _ => bail!("polling the completion queue failed"),
        }
    }
}
