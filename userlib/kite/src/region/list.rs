// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Listing the named regions of a node.

use std::os::fd::AsFd;

use crate::cluster::Cluster;
use crate::describe::RegionEntry;
use crate::error::Result;
use crate::sys;

/// Iterator over the named regions of a node. [`Cluster::regions`] creates it.
///
/// # Examples
/// ```no_run
/// let cluster = kite::Cluster::open()?;
/// for region in cluster.regions(kite::NODE_SELF) {
///     println!("{}", region?.name);
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct Regions<'a> {
    cluster: &'a Cluster,
    node: u32,
    cursor: u64,
    page: std::vec::IntoIter<RegionEntry>,
    exhausted: bool,
}

impl Cluster {
    /// Lists the named regions whose home is `node`; [`NODE_SELF`](crate::NODE_SELF) is this node.
    ///
    /// The iterator requests a page of 64 regions at a time, and ends after its first error.
    ///
    /// # Errors
    /// Items of the iterator are:
    /// - [`Error::HostDown`](crate::Error::HostDown): the node is not in the view.
    /// - [`Error::NotJoined`](crate::Error::NotJoined): this node is in no cluster.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): the node did not reply in time.
    pub fn regions(&self, node: u32) -> Regions<'_> {
        Regions {
            cluster: self,
            node,
            cursor: 0,
            page: Vec::new().into_iter(),
            exhausted: false,
        }
    }
}

impl Regions<'_> {
    /// Requests the next page. An empty page ends the listing.
    fn fetch_page(&mut self) -> Result<()> {
        let mut raw = vec![sys::kite_region_entry::default(); 64];
        let (count, cursor) =
            sys::list_regions(self.cluster.as_fd(), self.node, self.cursor, &mut raw)?;
        let page: Vec<RegionEntry> = raw[..count].iter().map(RegionEntry::from).collect();
        self.exhausted = page.is_empty();
        self.cursor = cursor;
        self.page = page.into_iter();
        Ok(())
    }
}

impl Iterator for Regions<'_> {
    type Item = Result<RegionEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.page.len() == 0 && !self.exhausted {
            if let Err(error) = self.fetch_page() {
                self.exhausted = true;
                return Some(Err(error));
            }
        }
        self.page.next().map(Ok)
    }
}

impl std::iter::FusedIterator for Regions<'_> {}
