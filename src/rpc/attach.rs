// SPDX-License-Identifier: GPL-2.0

//! How a node comes to call a service, and how that ends.
//!
//! The node that calls makes a ring for replies, and asks the home of the region for one for calls. To
//! answer a request no other node is ever asked, so the home maps the caller's ring in the background, and
//! is asked again until that is done.

use super::{
    link::Link,
    service::{Client, Service},
    Rpc, ROOT,
};
use crate::{
    errno,
    lmr::{alloc::Order, mapping::Mapping, reclaim::Haste, CONTROL_MS},
    sys::deadline::{settle, Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    rights::Rights,
    view::Life,
    wire::{Reply, Request},
};

/// Bytes of a ring for replies, which are taken from it at once.
const REPLY_RING: u64 = 64 << 10;

/// A ring as its own node names it to the other.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    pub(super) region: u64,
    pub(super) number: u16,
}

fn attached(reply: &Reply<'_>) -> Result<Ring> {
    match *reply {
        Reply::Attached { ring, number } => Ok(Ring {
            region: ring,
            number,
        }),
        _ => Err(EIO),
    }
}

impl Rpc {
    /// A link to whoever serves a mapped region, for one more handle; [`Self::detach`] is to follow.
    ///
    /// # Errors
    ///
    /// - `ECONNREFUSED` if nobody serves it.
    /// - `ECONNRESET` if its server has just ended.
    /// - `ESTALE` if the region was freed, `EHOSTDOWN` if its home died, `ETIMEDOUT`, `ENOMEM`.
    pub(crate) fn attach(
        self: &Arc<Self>,
        mapping: &Mapping,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        drop(mapping.enter()?);
        let life = self.lmr.cluster.life_of(mapping.home)?;
        let key = (life, mapping.region);
        if let Some(link) = self.join(key) {
            return Ok(link);
        }
        let link = self.connect(mapping, life, deadline)?;
        let mut clients = self.clients.lock();
        // Somebody may have been faster, and both will do; the next finds the later.
        let before = clients.try_create_and_insert(key, link.clone(), GFP_KERNEL);
        drop(clients);
        before
            .map(|_| link.clone())
            .inspect_err(|_| self.close(&link))
    }

    /// Uses a link that there is.
    fn join(&self, key: (Life, u64)) -> Option<Arc<Link>> {
        let link = self.clients.lock().get(&key).cloned();
        let link = link.filter(|link| link.check().is_ok())?;
        let mut users = link.users.lock();
        // With its last user it ends.
        let lives = *users != 0;
        *users += usize::from(lives);
        drop(users);
        lives.then_some(link)
    }

    /// A handle uses a link no more.
    pub(crate) fn detach(self: &Arc<Self>, link: Arc<Link>) {
        let mut users = link.users.lock();
        *users -= 1;
        let last = *users == 0;
        drop(users);
        if !last {
            return;
        }
        let key = (link.peer, link.region);
        let mut clients = self.clients.lock();
        let ours = clients
            .get(&key)
            .is_some_and(|other| Arc::ptr_eq(other, &link));
        let removed = ours.then(|| clients.remove(&key));
        drop(clients);
        drop(removed);
        self.close(&link);
        if let Some(theirs) = link.partner() {
            self.tell_detached(link.peer.node, theirs);
        }
    }

    fn connect(
        self: &Arc<Self>,
        mapping: &Mapping,
        life: Life,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let link = self.new_link(REPLY_RING, |number, inbound| {
            Link::new(number, life, mapping.region, None, inbound)
        })?;
        let asked = self.ask_home(mapping, &link, deadline);
        let asked = asked.map_err(|error| {
            if error == ENOENT {
                errno::stale()
            } else {
                error
            }
        });
        let connected = asked.and_then(|theirs| {
            let mapped = self.map_ring(mapping.home, theirs, &link, deadline);
            mapped
                .inspect_err(|_| self.tell_detached(mapping.home, theirs))
                .map_err(|error| {
                    if error == ENOENT {
                        errno::connreset()
                    } else {
                        error
                    }
                })
        });
        connected
            .map(|()| link.clone())
            .inspect_err(|_| self.close(&link))
    }

    /// An end with a ring of `len` bytes, which `make` makes.
    fn new_link(
        self: &Arc<Self>,
        len: u64,
        make: impl Fn(u16, Arc<Mapping>) -> Result<Arc<Link>>,
    ) -> Result<Arc<Link>> {
        let order = Order {
            len,
            nodes: &[],
            name: None,
            owner: ROOT,
            others: Rights::NONE,
        };
        let inbound = self.lmr.alloc(&order, self.watch.clone())?;
        self.number(|number| make(number, inbound.clone()))
            .inspect_err(|_| self.lmr.abandon(&inbound))
    }

    /// Maps the ring at the other end of a link, which may be at this node too.
    fn map_ring(
        self: &Arc<Self>,
        home: u32,
        theirs: Ring,
        link: &Link,
        deadline: Deadline,
    ) -> Result {
        let (lmr, watch) = (&self.lmr, self.watch.clone());
        // The poller tells that end what it has taken.
        lmr.begin_errands(link.peer);
        let ring = lmr.map_region(home, theirs.region, ROOT, Rights::WRITE, watch, deadline)?;
        link.connect(&lmr.cluster.fabric, ring.clone(), theirs.number)
            .inspect_err(|_| lmr.unmap(&ring))
    }

    fn ask_home(
        self: &Arc<Self>,
        mapping: &Mapping,
        link: &Link,
        deadline: Deadline,
    ) -> Result<Ring> {
        let (inbound, _) = link.rings();
        let request = Request::Attach {
            region: mapping.region,
            mapping: mapping.id,
            ring: inbound.region,
            number: link.number,
        };
        let (home, lmr) = (mapping.home, &self.lmr);
        if lmr.cluster.node() == Ok(home) {
            return settle(deadline, || attached(&self.decide(home, &request)?));
        }
        let answer = lmr.ask(home, &request, deadline)?;
        attached(&answer.reply()?)
    }

    /// Tells the home, in the background, that nobody here calls by its ring.
    fn tell_detached(self: &Arc<Self>, home: u32, theirs: Ring) {
        if self.lmr.cluster.node() == Ok(home) {
            return self.serve_detach(home, theirs);
        }
        let request = Request::Detach {
            ring: theirs.region,
            number: theirs.number,
        };
        self.lmr.errand(home, Haste::Idle, move |lmr, life| {
            lmr.insist(life, &request);
        });
    }

    /// Answers a node that wants to call: the region of its ring here, and the number of that.
    ///
    /// # Errors
    ///
    /// - `ENOENT`, `EACCES` if it has not mapped the region, to write.
    /// - `ECONNREFUSED` if nobody serves it; `EINPROGRESS`: ask again.
    pub(super) fn serve_attach(
        self: &Arc<Self>,
        life: Life,
        (region, mapping): (u64, u64),
        theirs: Ring,
    ) -> Result<Ring> {
        let lmr = &self.lmr;
        lmr.check_mapper(region, life.node, mapping, Rights::WRITE)?;
        let service = self.services.lock().get(&region).cloned();
        let service = service.ok_or_else(errno::connrefused)?;
        let link = service.link_for(life, theirs.region, || {
            // What is left of callers who gave up while they were asking.
            service.part_with(self, Client::is_over);
            let (rpc, service) = (self.clone(), service.clone());
            lmr.errand(life.node, Haste::Awaited, move |_, _| {
                let link = service.payer.pays(|| rpc.accept(&service, life, theirs));
                if let Some(unwanted) = service.made(life, theirs.region, link) {
                    rpc.close(&unwanted);
                }
            });
        })?;
        let (inbound, _) = link.rings();
        Ok(Ring {
            region: inbound.region,
            number: link.number,
        })
    }

    /// Makes the home's end of a link.
    fn accept(
        self: &Arc<Self>,
        service: &Arc<Service>,
        life: Life,
        theirs: Ring,
    ) -> Result<Arc<Link>> {
        let link = self.new_link(service.size(), |number, inbound| {
            Link::new(number, life, service.region, Some(service.clone()), inbound)
        })?;
        let deadline = Deadline::after_ms(CONTROL_MS);
        let connected = self.map_ring(life.node, theirs, &link, deadline);
        connected
            .map(|()| link.clone())
            .inspect_err(|_| self.close(&link))
    }

    /// A node calls no more by a ring of ours.
    pub(super) fn serve_detach(self: &Arc<Self>, node: u32, ours: Ring) {
        let link = self.ring(ours.number);
        let link =
            link.filter(|link| link.peer.node == node && link.rings().0.region == ours.region);
        if let Some(service) = link.as_ref().and_then(|link| link.service()) {
            let same =
                |other: &Arc<Link>| link.as_ref().is_some_and(|link| Arc::ptr_eq(link, other));
            service.part_with(self, |client| client.ready().is_some_and(same));
        }
    }

    /// Ends this end of a link that nobody finds any more.
    fn close(self: &Arc<Self>, link: &Link) {
        self.forget(link);
        let (inbound, outbound) = link.rings();
        self.lmr.abandon(inbound);
        if let Some(ring) = outbound {
            self.lmr.unmap(ring);
        }
        for relay in &link.kept.end() {
            self.lmr.unmap(relay);
        }
    }

    /// As [`Self::close`], after what is being done in the background for that node.
    pub(super) fn close_later(self: &Arc<Self>, link: Arc<Link>) {
        let node = link.peer.node;
        let closing = Closing {
            rpc: self.clone(),
            link,
        };
        self.errand(node, Haste::Idle, move || drop(closing));
    }

    /// Has `f` done in the background, after what else is for that node; if that is gone, `f` is dropped.
    pub(super) fn errand(&self, node: u32, haste: Haste, f: impl FnOnce() + Send + 'static) {
        self.lmr.errand(node, haste, move |_, _| f());
    }
}

/// Closes a link when it is dropped.
struct Closing {
    rpc: Arc<Rpc>,
    link: Arc<Link>,
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.rpc.close(&self.link);
    }
}
