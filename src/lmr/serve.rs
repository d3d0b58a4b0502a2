// SPDX-License-Identifier: GPL-2.0

//! Answers to the requests of other nodes, and of this one.
//!
//! Every request is meant to be made twice with the effect of once, and none waits for another node.

use super::{
    change::Word,
    lease::Key,
    lines::{Asked, Bearer, LineKey},
    reclaim::Haste,
    region::{Mapper, Region, Whom},
    Lmr,
};
use crate::{
    cluster::Target,
    errno,
    fabric::peer::Peer,
    sys::deadline::{is_killed, Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    layout::{Layout, Share},
    name::Name,
    rights::Rights,
    view::Life,
    wire::{
        self, Body, Entry, Header, Kind, ListWriter, Names, Reason, Reply, Request, MESSAGE_SIZE,
        PUSH,
    },
};

/// An error as the answer to what must not be done twice.
pub(super) fn errno_of(error: Error) -> u64 {
    error.to_errno().unsigned_abs().into()
}

/// The error that such an answer is, if it is not 0.
pub(super) fn refused(answer: u64) -> Result {
    match answer {
        0 => Ok(()),
        errno => Err(Error::from_errno(-(errno as c_int))),
    }
}

impl Lmr {
    /// Has a message of a peer answered on the workqueue, a request whose form has been checked. `serve`
    /// writes the answer to a request of a node, and returns its length.
    pub(crate) fn answer_later(
        self: &Arc<Self>,
        from: Arc<Peer>,
        header: Header,
        bytes: &[u8],
        serve: impl FnOnce(u32, &Header, &Request<'_>, &mut [u8]) -> usize + Send + 'static,
    ) {
        let mut copy = KVec::new();
        let (lmr, peer) = (self.clone(), from.clone());
        let queued = copy.extend_from_slice(bytes, GFP_KERNEL).and_then(|()| {
            self.requests
                .try_spawn(GFP_KERNEL, move || lmr.answer(&peer, &header, &copy, serve))
        });
        // If not, the peer asks again or gives up.
        if queued.is_err() {
            from.end_answer(&header);
        }
    }

    /// Answers a message. A change of view waits for those under way ([`Self::set_view`]), so that nothing
    /// is done for a node after what is left of it was cleared.
    fn answer(
        &self,
        from: &Peer,
        header: &Header,
        bytes: &[u8],
        serve: impl FnOnce(u32, &Header, &Request<'_>, &mut [u8]) -> usize,
    ) {
        let reply = self.prepare(from.life(), bytes, serve);
        let by = from.end_answer(header);
        let answer = reply.zip(by).ok_or(ENOMEM);
        let sent = answer.and_then(|(reply, by)| self.fabric().reply(from, by, &reply));
        if let Err(error) = sent {
            pr_debug!("node {}: not answered: {error:?}\n", from.node());
        }
    }

    /// Does what a node in this life asks for; returns the answer, unless there is no memory for it or
    /// the node is gone.
    fn prepare(
        &self,
        from: Life,
        bytes: &[u8],
        serve: impl FnOnce(u32, &Header, &Request<'_>, &mut [u8]) -> usize,
    ) -> Option<KVec<u8>> {
        let Ok((header, Body::Request(request))) = wire::decode(bytes) else {
            return None;
        };
        let mut reply = KVec::from_elem(0u8, MESSAGE_SIZE, GFP_KERNEL).ok()?;
        if !self.cluster.has(from) {
            return None;
        }
        let len = serve(from.node, &header, &request, &mut reply);
        reply.truncate(len);
        self.stats.calls_served.add(1);
        Some(reply)
    }
}

impl Lmr {
    /// Answers a request of `node`; returns the length of the answer in `out`.
    pub(crate) fn serve(
        self: &Arc<Self>,
        node: u32,
        header: &Header,
        request: &Request<'_>,
        out: &mut [u8],
    ) -> usize {
        let head = Self::reply_header(header);
        let list = match *request {
            Request::Alloc {
                lease,
                region,
                shift,
                chunks,
                tail,
            } => Share { chunks, tail }
                .layout(shift)
                .ok_or(EINVAL)
                .and_then(|layout| self.lend((node, lease), region, header.call, &layout))
                .and_then(|()| self.addresses(&head, (node, lease), 0, out)),
            Request::Chunks { lease, first } => self.addresses(&head, (node, lease), first, out),
            Request::Locate { region, first } => self.locate(&head, region, first, out),
            Request::List { cursor, limit } => Ok(self.list(&head, cursor, limit, out)),
            _ => Ok(0),
        };
        match list {
            Ok(0) => self.encode(header, self.decide(node, header, request), out),
            Ok(len) => len,
            Err(error) => self.encode(header, Err(error), out),
        }
    }

    fn reply_header(header: &Header) -> Header {
        Header {
            kind: Kind::Reply,
            ..*header
        }
    }

    /// Writes the answer to the request of that header; returns its length.
    pub(crate) fn encode(
        &self,
        header: &Header,
        answer: Result<Reply<'static>>,
        out: &mut [u8],
    ) -> usize {
        let reply = answer.unwrap_or_else(Self::failure);
        wire::encode_reply(&Self::reply_header(header), &reply, out).unwrap_or(0)
    }

    fn failure(error: Error) -> Reply<'static> {
        Reply::Failed {
            errno: error.to_errno().unsigned_abs(),
        }
    }

    /// Answers requests whose answer is not a list.
    fn decide(
        self: &Arc<Self>,
        node: u32,
        header: &Header,
        request: &Request<'_>,
    ) -> Result<Reply<'static>> {
        match *request {
            Request::Release { lease } => {
                self.check_view(header)?;
                self.leases.release((node, lease))?
            }

            Request::Trim { lease, ref chunks } => {
                self.check_view(header)?;
                self.leases.trim((node, lease), chunks.clone())?
            }
            Request::Register { name, region } => {
                self.check_keeper(&name)?;
                self.cluster
                    .names
                    .register(name, Target { home: node, region })?
            }
            Request::Unregister { name, region } => self
                .cluster
                .names
                .unregister(&name, Target { home: node, region }),
            Request::Lookup { name } => return self.lookup(&name),
            Request::Map {
                region,
                mapping,
                uid,
                rights,
            } => {
                let mapper = Mapper {
                    node,
                    mapping,
                    rights,
                    uid,
                };
                return self.map_for(mapper, region);
            }
            Request::Unmap { region, mapping } => {
                self.check_view(header)?;
                if let Ok(region) = self.regions.get(region) {
                    region.unmap(node, mapping);
                    self.spread_news(&region, None);
                }
            }
            Request::Free { region, mapping } => self.serve_free(node, region, mapping)?,
            Request::Invalidate { mapping, why } => self.invalidate(node, header, mapping, why)?,
            Request::Sync {
                epoch,
                last,
                ref names,
            } => self.sync(node, epoch, last, names)?,
            Request::Atomic {
                number,
                home,
                region,
                chunk,
                offset,
                atomic,
            } => {
                let place = (home, region, chunk);
                let word = self.serve_atomic(node, number, place, offset, atomic)?;
                return Ok(Reply::Was { word });
            }
            Request::Change {
                number,
                key,
                uid,
                addr,
                atomic,
            } => {
                let word = self.serve_change(node, number, Word { key, uid, addr }, atomic)?;
                return Ok(Reply::Was { word });
            }
            Request::Grant {
                number,
                region,
                mapping,
                whom,
                rights,
            } => {
                let peer = self.fabric().peer(node)?;
                let (whom, by) = (Whom::from_wire(whom), Some((&*peer, number)));
                self.set_rights((node, mapping), region, whom, rights, by)?
            }
            Request::Settle { region } => self.serve_settle(region)?,
            Request::Cancel { number } => {
                let canceled = self.fabric().peer(node)?.once(number, || Ok(0));
                // It may be too late for that too: then it was answered.
                if canceled == Err(errno::inprogress()) {
                    return Err(errno::inprogress());
                }
                if number & PUSH != 0 {
                    self.check_late(header)?;
                }
            }
            Request::Fill {
                number,
                at,
                len,
                byte,
            } => self.serve_fill(node, number, at, len, byte)?,
            Request::Copy {
                number,
                from,
                to,
                len,
            } => self.serve_copy(node, number, from, to, len)?,
            Request::Push {
                number,
                from,
                home,
                to,
                len,
            } => {
                let agreed = header.epoch == self.cluster.epoch();
                let pushed = self.serve_push(node, number, from, (home, to), len, agreed);
                self.check_late(header)?;
                pushed?
            }
            Request::Move {
                number,
                region,
                mapping,
                token,
                timeout_ms,
                ref nodes,
            } => {
                let deadline = Deadline::after_ms(timeout_ms);
                let begin =
                    || self.begin_move((node, mapping), region, token, nodes.clone(), deadline);
                let begin = || Ok(begin().err().map_or(0, errno_of));
                refused(self.fabric().peer(node)?.once(number, begin)?)?;
            }
            Request::Publish { ref target } => {
                let (addr, buckets) = self.cluster.enter_target(node, target)?;
                return Ok(Reply::Table { addr, buckets });
            }
            Request::Moving { region, token } => {
                self.regions.get(region)?.move_result(node, token)?
            }
            Request::Pause { number, region } => {
                let pause = || self.serve_pause(node, header, region).map(|()| 0);
                self.fabric().peer(node)?.once(number, pause)?;
            }
            Request::Resume {
                number,
                region,
                ref moved,
            } => {
                let resume = || {
                    self.resume_ours(node, region, moved.clone());
                    Ok(0)
                };
                self.fabric().peer(node)?.once(number, resume)?;
            }
            Request::Enter {
                ticket,
                region,
                mapping,
                line,
                wish,
                waits,
            } => {
                let peer = self.fabric().peer(node)?;
                let life = peer.life();
                let asked = Asked {
                    bearer: Bearer { life, ticket },
                    mapping,
                    number: line,
                    wish,
                    waits,
                };
                let word = self.admit(region, &asked, Some(&peer))?.to_word();
                return Ok(Reply::Was { word });
            }
            Request::Leave {
                ticket,
                region,
                line,
                wish,
                how,
            } => self.serve_leave(node, ticket, (region, LineKey::new(wish, line)), how)?,
            Request::Granted { ticket, said } => self.serve_granted(node, ticket, said)?,
            _ => return Err(EINVAL),
        }
        Ok(Reply::Done)
    }

    /// Whether a node has a region of this one mapped with these rights.
    ///
    /// # Errors
    ///
    /// As for [`Region::check`].
    pub(crate) fn check_mapper(
        &self,
        region: u64,
        node: u32,
        mapping: u64,
        rights: Rights,
    ) -> Result {
        self.regions.get(region)?.check(node, mapping, rights)
    }

    /// `EAGAIN` if who asks knows of a node's end that we do not: that node may still reach memory.
    fn check_view(&self, header: &Header) -> Result {
        let known = header.epoch <= self.cluster.epoch();
        known.then_some(()).ok_or(EAGAIN)
    }

    /// `EINPROGRESS` if we know of a node's end that who asks does not: what was sent to that node may come late, and
    /// it may not know either.
    pub(super) fn check_late(&self, header: &Header) -> Result {
        let agreed = header.epoch >= self.cluster.epoch();
        agreed.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Ends a mapping of a region of `node`: nothing of ours reaches the region's memory any more, nor does what
    /// the lenders were asked for.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if that is not certain yet. A lender of which we know that it is out of the view must not be
    /// asked for its memory by a home that does not know.
    fn invalidate(&self, node: u32, header: &Header, mapping: u64, why: Reason) -> Result {
        let found = self.mappings.get(mapping);
        let Some(found) = found.filter(|found| found.home == node) else {
            return Ok(());
        };
        found.invalidate(why);
        let certain = self.is_quiet(&found) && header.epoch >= self.cluster.epoch();
        certain.then_some(()).ok_or(EAGAIN)
    }

    fn map_for(&self, mapper: Mapper, region: u64) -> Result<Reply<'static>> {
        let region = self.regions.get(region)?;
        region.map(mapper)?;
        let layout = region.spec.layout;
        Ok(Reply::Mapped {
            len: layout.len(),
            shift: layout.shift(),
        })
    }

    fn is_foreign(&self, node: u32) -> bool {
        self.cluster.node() != Ok(node)
    }

    /// Lends memory, which may take long, unless the caller is gone before it is all there.
    fn lend(&self, key: Key, region: u64, call: u64, layout: &Layout) -> Result {
        let (node, _) = key;
        let epoch = self.cluster.epoch();
        let wanted = || self.check_wanted(node, call, epoch);
        self.leases
            .lend(key, region, layout, self.is_foreign(node), wanted)
    }

    /// Whether `node` still wants memory for its call, made in the view of `epoch`, and may have it: ours is
    /// freed when we leave the cluster, and none is lent to ourselves after that.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if the view has changed. That waits for us, and `node` may ask again.
    /// - `EINTR` if nobody waits for the memory any more.
    /// - `EHOSTDOWN`, `EHOSTUNREACH`.
    fn check_wanted(&self, node: u32, call: u64, epoch: u64) -> Result {
        let wanted = if self.cluster.node()? == node {
            !is_killed()
        } else if self.cluster.epoch() == epoch {
            self.fabric().peer(node)?.wants(call)
        } else {
            return Err(EAGAIN);
        };
        if wanted {
            Ok(())
        } else {
            Err(EINTR)
        }
    }

    fn addresses(&self, head: &Header, key: Key, first: u32, out: &mut [u8]) -> Result<usize> {
        let mut list = ListWriter::addresses(out, head.call, head.epoch);
        self.leases.addresses(key, first, |addr| list.push(addr))?;
        Ok(list.finish())
    }

    fn locate(&self, head: &Header, region: u64, first: u32, out: &mut [u8]) -> Result<usize> {
        let region = self.regions.get(region)?;
        let mut list = ListWriter::located(out, head.call, head.epoch);
        region.placement(|placement| {
            let mut rest = placement.places().iter().skip(first as usize);
            let _ = rest.all(|&chunk| list.push(chunk));
        });
        Ok(list.finish())
    }

    /// Up to `limit` named regions of this node, from number `cursor` on.
    fn list(&self, head: &Header, cursor: u64, limit: u32, out: &mut [u8]) -> usize {
        let mut list = ListWriter::entries(out, head.call, head.epoch);
        let (mut next, mut left) = (cursor, limit);
        while left != 0 {
            let Some(region) = self.regions.at_or_after(next) else {
                break;
            };
            if let Some(entry) = Self::entry(&region) {
                if !list.push(entry) {
                    break;
                }
                left -= 1;
            }
            next = region.id + 1;
        }
        list.set_cursor(next);
        list.finish()
    }

    fn entry(region: &Region) -> Option<Entry> {
        let name = region.known_name()?;
        let spec = &region.spec;
        Some(Entry {
            name,
            len: spec.layout.len(),
            owner: spec.owner,
            others: region.others(),
            mappers: region.mappers(),
        })
    }

    /// `EAGAIN` unless this node keeps `name` and has heard of all names.
    fn check_keeper(&self, name: &Name) -> Result {
        let ours = self.cluster.keeper(name)? == self.cluster.node()?;
        if ours && self.cluster.synced_epoch().is_some() {
            Ok(())
        } else {
            Err(EAGAIN)
        }
    }

    fn lookup(&self, name: &Name) -> Result<Reply<'static>> {
        if let Some(Target { home, region }) = self.cluster.names.lookup(name) {
            return Ok(Reply::Found { home, region });
        }
        self.check_keeper(name)?;
        Err(ENOENT)
    }

    /// Takes names that `node` is the home of, and that this node keeps as of `epoch`.
    fn sync(self: &Arc<Self>, node: u32, epoch: u64, last: bool, names: &Names<'_>) -> Result {
        if !self.is_present(epoch)? {
            return Ok(());
        }
        for (name, region) in names.clone() {
            let entered = self
                .cluster
                .names
                .register(name, Target { home: node, region });
            if entered == Err(EEXIST) {
                pr_warn!("node {node} has a name that another has: {name:?}\n");
            } else {
                entered?;
            }
        }
        let life = self.cluster.life_of(node)?;
        if last && self.cluster.note_synced(life, epoch) {
            self.on_synced();
        }
        Ok(())
    }

    /// Whether what a node tells for the view of `epoch` is about the present one.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it is about a later one.
    fn is_present(&self, epoch: u64) -> Result<bool> {
        if epoch > self.cluster.epoch() {
            // Our daemon has not told us yet.
            return Err(EAGAIN);
        }
        // An older one was repeated late. For the present view the node tells, or has told, anew.
        Ok(epoch == self.cluster.epoch())
    }

    /// A peer acts on the view of `epoch`, and has no names to tell for it.
    pub(crate) fn on_view(self: &Arc<Self>, from: &Peer, epoch: u64) {
        // If our daemon has not told us of that one yet, the peer tells again.
        let acting = self.cluster.epoch();
        if self.cluster.note_synced(from.life(), epoch) {
            let lmr = self.clone();
            self.requests.spawn(move || lmr.on_synced());
        }
        self.fabric().answer_view(from, epoch, acting);
    }

    /// Ends what waited for all to have heard of a view: memory that was lent to the dead, and their locks.
    pub(super) fn on_synced(self: &Arc<Self>) {
        if let Some(epoch) = self.cluster.synced_epoch() {
            self.leases.free_orphans(epoch);
            self.bury_tickets();
        }
    }

    /// Begins to free a region, or says how far it is: `EINPROGRESS` until nobody can reach its memory.
    fn serve_free(self: &Arc<Self>, node: u32, region: u64, mapping: u64) -> Result {
        let Ok(region) = self.regions.get(region) else {
            return Ok(());
        };
        if region.begin_free(node, mapping)? {
            self.reclaim_later(&region, Haste::Awaited);
        }
        Err(errno::inprogress())
    }
}
